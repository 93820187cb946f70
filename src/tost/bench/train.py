"""What the training engine costs on top of a bare loop over the same model, data and optimiser.

Both sides take turns, a stretch of steps each. The gate is that they take the same steps: their losses must agree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tost.bench.harness.environment import Environment, describe_environment
from tost.bench.harness.timing import Spread, spread
from tost.data import make_loader
from tost.data._random import mix
from tost.errors import TostError
from tost.recipes import get_task
from tost.train.config import RunConfig
from tost.train.loop import fit
from tost.train.metrics import StepRecord
from tost.train.optim import build_optimizer
from tost.train.schedule import learning_rate

__all__ = ["OverheadReport", "measure_overhead"]

TOLERANCE = 1e-5
"""Largest accepted relative difference of a loss between the two sides."""


@dataclass(frozen=True, kw_only=True)
class OverheadReport:
    """Times per step of both sides, in seconds, and their ratio.

    Attributes:
        command: What was run.
        environment: Where.
        steps: Steps per stretch, of which the first is not timed.
        bare: Seconds per step of the bare loop, one value per stretch.
        engine: The same of the engine.
        ratio: Engine over bare, stretch by stretch.
    """

    command: str
    environment: Environment
    steps: int
    bare: Spread
    engine: Spread
    ratio: Spread

    def to_json(self) -> dict[str, object]:
        """Return one object of plain types."""
        return {"theme": "train", **asdict(self)}


class _Stopwatch:
    """A reporter that notes when logged steps end, and their losses."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}
        self.losses: dict[int, float] = {}

    def message(self, text: str) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        self.note(record.step, record.loss)

    def note(self, step: int, loss: float) -> None:
        self.ends[step] = time.perf_counter()
        self.losses[step] = loss

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    @property
    def seconds_per_step(self) -> float:
        first, last = min(self.ends), max(self.ends)
        return (self.ends[last] - self.ends[first]) / (last - first)


def measure_overhead(config: RunConfig, *, repeats: int, command: str, report: Callable[[str], None]) -> OverheadReport:
    """Time the engine against a bare loop.

    Args:
        config: What both sides train; all its steps are taken in each stretch, without evaluations in between.
        repeats: Stretches per side.
        command: How this was asked for, for the record.
        report: Gets a line per stretch.

    Raises:
        TostError: The two sides do not take the same steps, so a comparison would mean nothing.
    """
    times: dict[str, list[float]] = {"bare": [], "engine": []}
    for index in range(repeats + 1):
        bare, engine = _bare(config), _engine(config)
        worst = max(abs(loss - bare.losses[step]) / abs(loss) for step, loss in engine.losses.items())
        if worst > TOLERANCE:
            raise TostError(f"the engine and the bare loop do not take the same steps: losses differ by {worst:.1e}")
        if index:  # the first pair warms up
            times["bare"].append(bare.seconds_per_step)
            times["engine"].append(engine.seconds_per_step)
            report(f"[{index}/{repeats}] bare {bare.seconds_per_step:.4f} engine {engine.seconds_per_step:.4f} s/step")
    ratios = [engine / bare for bare, engine in zip(times["bare"], times["engine"], strict=True)]
    return OverheadReport(
        command=command,
        environment=describe_environment(),
        steps=config.train.steps,
        bare=spread(times["bare"]),
        engine=spread(times["engine"]),
        ratio=spread(ratios),
    )


def _engine(config: RunConfig) -> _Stopwatch:
    watch = _Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        fit(config, get_task(config.recipe), Path(folder) / "run", resume=None, reporter=watch)
    return watch


def _bare(config: RunConfig) -> _Stopwatch:
    watch, task = _Stopwatch(), get_task(config.recipe)
    bundle = task.build_data(config)
    torch.manual_seed(config.train.seed)
    model = task.build_model(config, bundle)
    optimizer = build_optimizer(model, config.optim)
    batches = iter(make_loader(bundle.train, batch_size=config.train.batch_size, seed=config.train.seed))
    model.train()
    for step in range(config.train.steps):
        batch = task.training_batch(next(batches), config, mix(config.train.seed, step, 0, 0))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config=config.schedule, peak=config.optim.lr, total=config.train.steps)
        loss = task.compute(model, batch).loss / task.terms(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if config.train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.note(step + 1, loss.item())
    return watch
