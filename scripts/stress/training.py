"""Training runs that are killed at random moments and resumed."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from compare import BATCHES, compare_runs
from job import Job, Scenario
from victims import Victim

STEPS = 24
TINY = (
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "model.dropout=0.1",
    f"train.steps={STEPS}",
    "train.batch_size=8",
    "checkpoint.every=2",
    "evaluate.every=8",
    "evaluate.batches=2",
    "log.every=1",
)


def train_command(out: Path, *options: str, config: str = "demo/digits") -> list[str]:
    """Return the command that starts or resumes a tiny run."""
    return ["train", config, *TINY, *options, "--out", str(out), "--resume", "auto", "--progress", "plain"]


def record_batches(out: Path) -> Callable[[], None]:
    """Return what makes a victim write down step, part, rank and hash of each batch that it trains on."""

    def prepare() -> None:
        from tost.train import loop

        original, rank = loop._Run._step, os.environ.get("RANK", "0")

        def step(run: Any, batches: Iterator[Any]) -> Any:
            parts = enumerate(batches)
            return original(run, (_note(out / BATCHES, f"{run.step}.{part} {rank}", batch) for part, batch in parts))

        loop._Run._step = step  # type: ignore[method-assign]

    return prepare


def _note(path: Path, place: str, batch: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(b"".join(batch[name].numpy().tobytes() for name in sorted(batch))).hexdigest()
    with path.open("a") as file:
        file.write(f"{place} {digest}\n")
    return batch


def killed_runs(
    *options: str, config: str = "demo/digits", processes: int = 1, stop: bool = False, share: float = 1.0
) -> Scenario:
    """Return the scenario of runs with some options that are killed and resumed until they end, then compared.

    Args:
        *options: Settings of the run.
        config: The recipe.
        processes: How many processes share the work.
        stop: Ask the run to stop instead, which must save and exit with 130, or with -15 before training begins.
        share: Part of the kills.
    """

    def run(job: Job) -> None:
        reference = job.folder / "reference"
        started = time.monotonic()
        job.run(
            train_command(reference, *options, config=config), prepare=record_batches(reference), processes=processes
        )
        whole = time.monotonic() - started
        while not job.done:
            _one_run(job, reference, options, config, processes, whole, stop)

    about = ", ".join(options) or "one process"
    what = "asked to stop" if stop else "killed"
    plural = f", {processes} processes" if processes > 1 else ""
    return Scenario(
        f"training {what}, {config}: {about}{plural}", run, share=share, counted="stops" if stop else "kills"
    )


def _one_run(
    job: Job, reference: Path, options: Sequence[str], config: str, processes: int, whole: float, stop: bool
) -> None:
    """Kill one run until enough was killed or it ends by itself; let it end and compare it."""
    out = job.folder / f"victim-{job.counts['compared']}"
    command, recording = train_command(out, *options, config=config), record_batches(out)
    while not job.done:
        victim = job.start(command, prepare=recording, processes=processes)
        _wait_for_a_moment(job, victim, out, whole)
        if victim.poll() is not None:
            job.expect(victim.poll() == 0, f"ended by itself: {victim.output[-2000:]}")
            victim.sweep_up()
            break
        job.counts["kills"] += 1
        if stop:
            _stop(job, victim)
        else:
            # Data workers of the victim may live on; they must not keep the next one from starting.
            victim.kill(gap=job.chance.choice([0, 0, 0.02]), alone=job.chance.random() < 0.5)
            job.counts["before the first checkpoint"] += not any(out.glob("checkpoints/step-*"))
            job.counts["inside a checkpoint"] += any(out.glob("checkpoints/.tmp-*"))
    job.run(command, prepare=recording, processes=processes)
    if differences := compare_runs(reference, out):
        job.differences.append(f"{out.name}: {', '.join(differences[:20])}")
        return
    job.counts["compared"] += 1
    shutil.rmtree(out)


def _wait_for_a_moment(job: Job, victim: Victim, out: Path, whole: float) -> None:
    """Wait for the moment of the next kill: any, one of the start, or one in which a checkpoint is written."""
    kind = job.chance.random()
    if kind < 0.3:
        for _ in range(job.chance.randrange(1, 4)):
            victim.wait_for(lambda: any(out.glob("checkpoints/.tmp-*")), 10 * whole)
            victim.wait_for(lambda: not any(out.glob("checkpoints/.tmp-*")), job.chance.random() * 0.02)
    else:
        victim.wait_for(lambda: False, job.chance.random() * (0.3 if kind < 0.5 else 0.9) * whole)


def _stop(job: Job, victim: Victim) -> None:
    early = "steps to go" not in victim.output
    victim.terminate()
    code, output = victim.wait(), victim.output
    finished = code == 0 and "finished at step" in output  # the request came after the last step
    job.expect(code in ((-15, 130, 0) if early else (130, 0)), f"exit code {code} upon SIGTERM: {output[-2000:]}")
    job.expect(code != 130 or "interrupted at step" in output or early, f"nothing was said: {output[-1000:]}")
    job.expect(finished or code != 0, f"exit code 0, but not finished: {output[-1000:]}")
    job.expect("Traceback" not in output, f"a traceback upon SIGTERM: {output[-3000:]}")


BYTES = ("model.max_length=32", "data.options.length=32")
SCENARIOS = {
    "train": killed_runs(),
    "train-workers": killed_runs("data.workers=2"),
    "train-average": killed_runs("train.ema_decay=0.9"),
    "train-accumulate": killed_runs("train.accumulate=2", "train.clip_norm=1.0"),
    "train-bf16": killed_runs("train.precision=bf16", share=0.3),
    "train-all": killed_runs(
        "data.workers=2", "train.ema_decay=0.9", "train.accumulate=2", "train.precision=bf16", share=0.3
    ),
    "train-language": killed_runs(*BYTES, "data.workers=1", config="demo/stdlib_bytes"),
    "train-two": killed_runs("train.ema_decay=0.9", processes=2),
    "train-sharded": killed_runs("parallel.strategy=fsdp", processes=2),
    "train-context": killed_runs("parallel.context=2", *BYTES, config="demo/stdlib_bytes", processes=2),
    "stop": killed_runs("data.workers=1", stop=True, share=0.3),
    "stop-two": killed_runs(processes=2, stop=True, share=0.3),
}
