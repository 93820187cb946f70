"""The training loop: evaluate, save, stop, step, log; in that order, on one process or many.

Every optimizer step takes the same global batch whatever the number of processes, workers or micro-batches, and the
loss is normalized by the number of terms in that global batch. So runs on different numbers of processes take the same
steps, up to the rounding of sums.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tost._io import writing
from tost._machine import DeviceChoice, source_revision
from tost._progress import Pace, format_progress
from tost._text import count, html_card, log_line, number
from tost._yaml import show_value
from tost.data import Batch, make_loader
from tost.data._random import mix
from tost.data.loader import watching_workers
from tost.errors import TrainingError
from tost.train.checkpoint.files import CheckpointStore, resolve_checkpoint
from tost.train.checkpoint.model import Head, load_initial
from tost.train.checkpoint.state import Position, RunState, restore_checkpoint, save_checkpoint
from tost.train.config import RunConfig
from tost.train.distributed import Distributed, resolve_precision
from tost.train.evaluate.metrics import measure
from tost.train.metrics import Progress, StepRecord, format_line, measure_peak_flops
from tost.train.optim import WeightAverage, build_optimizer, learning_rate, set_rate
from tost.train.runfolder import RunFolder, changed_settings, check_changes, describe_environment
from tost.train.task import Task


class Reporter(Protocol):
    """Receives the events of a training run."""

    def message(self, text: str) -> None:
        """Receive a line about the run."""

    def step(self, record: StepRecord) -> None:
        """Receive an optimizer step that is due to be logged."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive validation metrics."""


class LineReporter:
    """Writes one greppable line per event to stderr, or to another place that takes lines.

    Args:
        write: Receives the lines.
    """

    def __init__(self, write: Callable[[str], None] = log_line) -> None:
        self.write = write

    def message(self, text: str) -> None:
        """Write a line about the run."""
        self.write(text)

    def step(self, record: StepRecord) -> None:
        """Write loss, speed and time left."""
        self.write(format_line(record))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write validation metrics."""
        values = " | ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.message(f"eval step {step} | {values}")


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_UNCHECKED = 50


class _Loss(NamedTuple):
    """Loss and gradient norm of an optimizer step, on the device; None for a norm that was not computed."""

    step: int
    value: Tensor
    lr: float
    norm: Tensor | None


@dataclass(frozen=True)
class RunResult:
    """Status, step and validation metrics at the end of a run.

    The status is ``"finished"``, ``"interrupted"`` by a signal, or ``"stopped"`` by ``train.max_minutes``.
    """

    status: str
    step: int
    metrics: Mapping[str, float]

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        metrics = {name: number(value) for name, value in self.metrics.items()}
        return html_card("run", {"status": self.status, "step": self.step, **metrics})


def fit(
    config: RunConfig,
    task: Task,
    out: Path,
    *,
    resume: str | Path | None = None,
    reporter: Reporter | None = None,
    device: DeviceChoice = "auto",
    accept_data_change: bool = False,
) -> RunResult:
    """Run a recipe until its last step or until a signal stops it.

    Args:
        config: What to run.
        task: How to build the model and what a batch costs.
        out: The run folder.
        resume: Checkpoint or run folder to resume from; ``"auto"`` for the newest checkpoint of `out`, or a new run if
            it has none; None for a new run.
        reporter: Receives the events of the first process; None for lines on stderr.
        device: Where to compute; ``"auto"`` takes a GPU if there is one.
        accept_data_change: Resume although the content of the data set has changed.

    Returns:
        How the run ended.

    Raises:
        TrainingError: The loss, the gradient, the weights or the final metrics are not finite, or another process was
            ended. The last checkpoint is kept.
        CheckpointError: `resume` is damaged or does not fit this run.
        ConfigError: Another process writes to the run folder, or it holds a run that would be overwritten.
        StorageError: The run folder cannot be written, or a data worker was killed.
    """
    reporter, folder = reporter or LineReporter(), RunFolder(out)
    resumed = out if resume == "auto" else None
    if resume is not None and resume != "auto":  # if there is no checkpoint, nothing is written
        resumed = resolve_checkpoint(Path(resume), lambda line: None, files=()).parents[1]
    automatic, config = config.train.precision == "auto", resolve_precision(config, device, resumed)
    start = None
    with Distributed.join(config, out, device=device) as processes, ExitStack() as lock:
        with processes.together():
            if processes.is_first:
                lock.enter_context(folder.locked(reporter.message))
                start = folder.find_start(resume, reporter.message)
        if not processes.is_first and resume is not None:
            start = folder.find_start(resume, lambda line: None)
        run = _Run(config, task, folder, processes, reporter, start, accept_data_change, automatic)
        run.start()
        with StopRequest() as stop, watching_workers():
            return run.until_done(stop)


class _Run:
    """The moving parts of a run; `fit` wires them and `until_done` is the loop."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        folder: RunFolder,
        processes: Distributed,
        reporter: Reporter,
        resume: Path | None,
        accept_data_change: bool,
        automatic: bool,
    ) -> None:
        self.precision = f"{config.train.precision}{' (train.precision=auto)' if automatic else ''}"
        self.config, self.task, self.processes, self.reporter = config, task, processes, reporter
        self.pace = Pace()
        self.folder, self.resume, self.accept_data_change = folder, resume, accept_data_change
        self.store = CheckpointStore(self.folder.checkpoints, keep=config.checkpoint.keep)
        self.began = time.perf_counter()
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.best: float | None = None
        self.bad_since: int | None = None
        self.unchecked: list[_Loss] = []

        self.bundle = task.build_data(config)
        processes.seed(config.train.seed)  # only now: a library that is imported for the data may draw numbers
        self.model = task.build_model(config, self.bundle)
        self.flops = task.flops(self.model, self._sample())
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.origin = None
        if config.train.init_from and resume is None:
            head: Head = "new" if config.train.new_head else "fit"
            self.origin = load_initial(self.model, config.train.init_from, reporter.message, head=head)
        if config.train.compile:
            self.model.compile()
        self.wrapped, self.optimizer = processes.prepare(self.model, lambda model: build_optimizer(model, config.optim))
        self.average = None
        if config.train.ema_decay is not None:
            self.average = WeightAverage(self.model, config.train.ema_decay)
        self.loader = make_loader(
            self.bundle.train,
            batch_size=config.train.batch_size // (processes.data_size * config.train.accumulate),
            seed=config.train.seed,
            rank=processes.data_rank,
            world_size=processes.data_size,
            workers=config.data.workers,
            pin_memory=processes.pin_memory,
        )
        fingerprint = self.bundle.info.fingerprint
        self.state = RunState(self.wrapped, self.optimizer, self.average, self.loader, fingerprint, processes)

    def start(self) -> None:
        """Restore a checkpoint or begin, write the folder's first files and say what runs."""
        config, processes, resume = self.config, self.processes, self.resume
        environment = describe_environment(processes.device, processes.size)
        if resume is not None:
            position, data_changes = restore_checkpoint(resume, self.state, accept_data_change=self.accept_data_change)
            self.step, self.metrics, self.best = position.step, dict(position.metrics), position.best
            self._note_metrics()
        changes = changed_settings(self.folder.path if resume is None else resume.parents[1], config)
        if resume is not None:
            check_changes(changes, resume.name)
            changes |= data_changes
        processes.wait()  # until all have read
        if processes.is_first:
            with writing(self.folder.path):
                aside = self.store.go_on(self.step, resume)
                self.folder.drop_after(self.step)
                self.folder.start(config, environment, self.origin)
                self.task.save_artifacts(config, self.folder.path)
            if changes:
                self.folder.record({"step": self.step, "changes": changes}, "changes.jsonl")
            for key, (old, new) in changes.items():
                self._say(f"changed from step {self.step} on: {key}: {show_value(old)} -> {show_value(new)}")
            if aside:
                self._say(
                    f"set aside {count(len(aside), 'checkpoint')} of later steps as {self.folder.checkpoints}/"
                    f"{aside[-1].name} and so on; delete what you do not need"
                )
        peak = measure_peak_flops(processes.device, DTYPES[config.train.precision]) * processes.size
        self.progress = Progress(
            steps=config.train.steps,
            tokens_per_step=self.task.tokens(self._sample()) * config.train.batch_size,
            # The backward pass computes two products for each one of the forward pass.
            flops_per_step=None if self.flops is None else 3.0 * self.flops * config.train.batch_size,
            peak_flops=peak,
        )
        processes.start_trackers(config)
        self._say(
            f"{config.recipe}: {config.model.name}, {self.parameters:,} parameters, "
            f"{config.train.steps - self.step} of {config.train.steps} steps to go"
        )
        self._say(f"{processes.description}, {self.precision}; operators: {processes.describe_backends()}")
        if self.origin is not None:
            self._say(str(self.origin))
        if resume is not None:
            self._say(f"resumed from {resume.name} at step {self.step}")

    def until_done(self, stop: StopRequest) -> RunResult:
        """Evaluate? Save? Stop? Then step and log, until the last step is done."""
        config, steps = self.config, self.config.train.steps
        batches = iter(self.loader)
        fresh = True  # nothing to evaluate or save before the first step of this process
        while True:
            last = self.step >= steps
            best = not fresh and (last or self._due(config.evaluate.every)) and self._evaluate()
            interrupted = self.processes.any(stop.requested) and not last
            spent = time.perf_counter() - self.began
            budget = config.train.max_minutes
            stopped = budget is not None and self.processes.any(spent >= 60 * budget)
            stopped = stopped and not fresh and not last and not interrupted
            if stopped and not self._due(config.evaluate.every):
                best = self._evaluate()
            if not fresh and (last or interrupted or stopped or best or self._due(config.checkpoint.every)):
                self._save(best)
            if last or interrupted or stopped:
                return self._finish("interrupted" if interrupted else "stopped" if stopped else "finished")
            taken = self._step(batches)
            fresh = False
            if self.step % config.log.every == 0 or self.step in (1, steps):
                self._log(taken)
            elif self.processes.is_first and self.pace.due():
                self.reporter.step(self._record(taken))

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _step(self, batches: Iterator[Batch]) -> _Loss:
        """Take one optimizer step."""
        config, processes = self.config, self.processes
        lr = learning_rate(self.step, config=config.schedule, peak=config.optim.lr, total=config.train.steps)
        set_rate(self.optimizer, lr)
        micro = []
        for part in range(config.train.accumulate):  # what is drawn for a micro-batch depends on its number only
            seed = mix(config.train.seed, self.step, part, processes.data_rank)
            micro.append(self.task.training_batch(processes.place(next(batches)), config, seed))
        count = sum(self.task.terms(batch) for batch in micro)
        terms = processes.sum(torch.as_tensor(count, dtype=torch.float64, device=processes.device))
        loss = torch.zeros((), device=processes.device)
        self.wrapped.train()
        with processes.context():  # one for all micro-batches: autocast rounds each weight once
            for index, batch in enumerate(micro):
                with processes.sync_gradients(self.wrapped, index == len(micro) - 1):
                    result = self.task.compute(self.wrapped, batch)
                    # Data parallel training averages gradients over processes; the sum over all terms is wanted.
                    processes.accelerator.backward(result.loss * (processes.size / terms).to(result.loss.dtype))
                loss += result.loss.detach()
        norm = processes.clip(self.wrapped, config.train)
        taken = _Loss(self.step + 1, processes.sum(loss.double()) / terms, lr, norm)
        self.unchecked.append(taken)
        if len(self.unchecked) >= (MOST_UNCHECKED if processes.asynchronous else 1):
            self._check_losses()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        self.step += 1
        processes.trim_memory()
        self.progress.step_done()
        return taken

    def _check_losses(self) -> None:
        """Raise if a loss or a gradient since the last check is not finite.

        Reading a loss waits for the device. So losses are checked several at a time, and always before anything is
        logged, measured or saved.
        """
        if not self.unchecked:
            return
        # fp16 gradients overflow now and then; the scaler skips these steps.
        scaled = self.processes.accelerator.scaler is not None
        values = [t.value if scaled or t.norm is None else t.value + t.norm for t in self.unchecked]
        finite = torch.stack(values).isfinite()
        if not finite.all():
            taken = self.unchecked[int(finite.logical_not().nonzero()[0])]
            loss = taken.value.item()
            what = f"the loss is {loss}"
            if math.isfinite(loss) and taken.norm is not None:
                what = f"the gradient norm is {float(taken.norm)}, with a loss of {loss:.4g},"
            self.step = taken.step - 1
            self._fail(f"{what} at step {taken.step} (learning rate {taken.lr:.2e}); the step was not taken")
        self.unchecked.clear()

    def _log(self, taken: _Loss) -> None:
        record = self._record(taken)
        if self.processes.is_first:
            self.folder.record({"kind": "step", **asdict(record)})
            self.reporter.step(record)
            self.pace.said()
        self.processes.accelerator.log({"loss": record.loss, "lr": record.lr}, self.step)

    def _record(self, taken: _Loss) -> StepRecord:
        self._check_losses()
        return StepRecord(
            step=self.step,
            steps=self.config.train.steps,
            loss=taken.value.item(),
            lr=taken.lr,
            grad_norm=None if taken.norm is None else float(taken.norm),
            tokens_per_second=self.progress.tokens_per_second,
            seconds_per_step=self.progress.seconds_per_step,
            mfu=self.progress.mfu,
            memory_bytes=self.processes.memory_bytes(),
            eta_seconds=self.progress.eta_seconds(self.step),
            unit=self.task.unit,
        )

    def _evaluate(self) -> bool:
        """Measure the validation set and return whether it is the best so far."""
        self._check_losses()
        average = self.average if self.config.evaluate.weights == "average" else None
        began = Pace()

        def report(done: int, total: int) -> None:
            if self.processes.is_first and self.pace.due():
                self.reporter.message(format_progress(f"eval step {self.step}", done, total, began.elapsed))

        with nullcontext() if average is None else average.applied():
            validation = self.bundle.validation
            self.metrics = measure(self.wrapped, self.task, validation, self.config, self.processes, report).metrics
        if self.processes.is_first:
            self.pace.said()
            self.folder.record({"kind": "evaluation", "step": self.step, **self.metrics})
            self.reporter.evaluation(self.step, self.metrics)
        self.processes.accelerator.log({f"validation/{name}": value for name, value in self.metrics.items()}, self.step)
        self.progress.pause()
        self._note_metrics()
        value = self.metrics.get(self.config.checkpoint.best_metric or "")
        sign = 1 if self.config.checkpoint.best_mode == "max" else -1
        best = value is not None and math.isfinite(value) and (self.best is None or sign * value > sign * self.best)
        self.best = value if best else self.best
        return best

    def _note_metrics(self) -> None:
        """Note since which step the metrics that judge the model are not finite."""
        judged = {"loss", self.task.metric, self.config.checkpoint.best_metric}
        if all(math.isfinite(value) for name, value in self.metrics.items() if name in judged):
            self.bad_since = None
        elif self.bad_since is None:
            self.bad_since = self.step

    def _save(self, best: bool) -> None:
        self._check_losses()
        weights = [p.detach() for p in self.model.parameters()]
        finite = torch.stack([(p.to_local() if isinstance(p, DTensor) else p).isfinite().all() for p in weights]).all()
        if self.processes.any(not finite):
            self._fail(f"the weights are not finite after step {self.step}; they were not saved")
        position = Position(step=self.step, metrics=self.metrics, best=self.best)
        save_checkpoint(self.store, position, self.state, best=best)
        self.progress.pause()

    def _finish(self, status: str) -> RunResult:
        failed = status != "interrupted" and self.bad_since is not None
        if self.processes.is_first:
            self.folder.write_summary(self._summary("failed" if failed else status))
        self._say(f"{status} at step {self.step}; results in {self.folder.path}")
        if failed:
            raise TrainingError(
                f"the run {status} at step {self.step}, but its metrics are not finite since the evaluation of step "
                f"{self.bad_since}: {', '.join(f'{name} {value}' for name, value in self.metrics.items())}. Train "
                "again with a lower optim.lr, with train.clip_norm, or in another train.precision."
            )
        return RunResult(status, self.step, self.metrics)

    def _fail(self, problem: str) -> None:
        kept = self.store.newest(lambda _: None) if self.processes.is_first else None
        if self.processes.is_first:
            self.folder.write_summary(self._summary("failed"))
        where = "no checkpoint was written yet" if kept is None else f"the last good state is {kept}"
        raise TrainingError(
            f"{problem} and {where}. Resume with a lower optim.lr, with train.clip_norm, or in another train.precision."
        )

    def _summary(self, status: str) -> dict[str, Any]:
        return {
            "status": status,
            "steps": self.step,
            "final": self.metrics,
            "best": self.best,
            "parameters": self.parameters,
            "seconds": round(time.perf_counter() - self.began, 1),
            "peak_memory_bytes": self.processes.peak_memory_bytes(),
            "revision": source_revision(),
        }

    def _sample(self) -> Batch:
        return {name: value.unsqueeze(0) for name, value in self.bundle.train[0].items()}

    def _say(self, text: str) -> None:
        if self.processes.is_first:
            self.folder.log(text)
            self.reporter.message(text)


GRACE_SECONDS = 0.5
"""Signals that follow the first one so soon are the same wish: a launcher passes on what the terminal sent to all."""


class StopRequest:
    """Records signals for the duration of a ``with`` block.

    Attributes:
        requested: Whether a signal has asked the process to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python does not let us
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
        elif signum == signal.SIGINT and now - self._since > GRACE_SECONDS:
            raise KeyboardInterrupt
