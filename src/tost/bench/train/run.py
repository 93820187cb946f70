"""What the training engine costs on top of a bare loop over the same model, data and optimizer.

Both sides take turns, a stretch of steps each. The gate is that they take the same steps: their losses must agree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tost._text import Table
from tost.bench.harness.gate import Check, GateResult
from tost.bench.harness.measurement import Measurement
from tost.bench.harness.table import with_quartiles
from tost.bench.harness.timing import Spread, spread
from tost.bench.train.cases import TrainScale
from tost.data import make_loader
from tost.data._random import mix
from tost.errors import TostError
from tost.recipes import get_task, load_config
from tost.train.config import RunConfig
from tost.train.loop import SilentReporter, fit
from tost.train.metrics import StepRecord
from tost.train.optim import build_optimizer
from tost.train.schedule import learning_rate

TOLERANCE = 1e-5
"""Largest accepted relative difference of a loss between the two sides."""

_STANDARD = (
    *("train.steps=40", "schedule.warmup_steps=5", "checkpoint.every=1000", "checkpoint.best_metric=null"),
    *("evaluate.every=0", "evaluate.batches=1"),
)


@dataclass(kw_only=True)
class TrainResults:
    """Times per step of both sides, in seconds, and their ratio.

    Attributes:
        steps: Steps per stretch, of which the first is not timed.
        bare: Seconds per step of the bare loop, one value per stretch.
        engine: The same of the engine.
        ratio: Engine over bare, stretch by stretch.
    """

    steps: int = 0
    bare: Spread | None = None
    engine: Spread | None = None
    ratio: Spread | None = None


class _Stopwatch(SilentReporter):
    """A reporter that notes when logged steps end, and their losses."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}
        self.losses: dict[int, float] = {}

    def step(self, record: StepRecord) -> None:
        self.note(record.step, record.loss)

    def note(self, step: int, loss: float) -> None:
        self.ends[step] = time.perf_counter()
        self.losses[step] = loss

    @property
    def seconds_per_step(self) -> float:
        first, last = min(self.ends), max(self.ends)
        return (self.ends[last] - self.ends[first]) / (last - first)


class TrainMeasurement(Measurement[TrainScale, TrainResults]):
    """The benchmark `tost bench train`: all steps of a configuration in each stretch, without evaluations."""

    results = TrainResults
    heading = "The training engine against a bare loop"
    checked = "the losses of the engine with those of a bare loop"

    def __init__(self, scale: TrainScale) -> None:
        super().__init__(scale)
        self.config = load_config(scale.config, [*_STANDARD, *scale.overrides])

    def about(self) -> dict[str, Any]:
        """The command has everything."""
        return {}

    def check(self) -> GateResult:
        """Take a first stretch on both sides, which warms up, and compare the losses."""
        return GateResult(checks=(Check(name="losses", error=_compare(self.config)[2], bound=TOLERANCE),))

    @property
    def steps(self) -> int:
        """One step per stretch."""
        return self.scale.repeats

    def measure(self, results: TrainResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Time stretches of both sides in turns.

        Raises:
            TostError: The two sides do not take the same steps, so a comparison would mean nothing.
        """
        times: list[tuple[float, float]] = []
        for _ in range(self.scale.repeats):
            watch(f"{self.config.train.steps} steps of each side")
            bare, engine, difference = _compare(self.config)
            if difference > TOLERANCE:
                raise TostError(
                    f"the engine and the bare loop do not take the same steps: losses differ by {difference:.1e}"
                )
            times.append((bare, engine))
            results.steps = self.config.train.steps
            results.bare, results.engine = (spread(each) for each in zip(*times, strict=True))
            results.ratio = spread([engine / bare for bare, engine in times])
            yield f"bare {bare:.4f} engine {engine:.4f} s/step"

    @staticmethod
    def tables(results: TrainResults) -> list[Table]:
        """Return the time of a step on both sides."""
        lines = [
            (name, f"{1e3 * value.median:.2f}", f"{1e3 * value.lower:.2f}-{1e3 * value.upper:.2f}")
            for name, value in (("bare loop", results.bare), ("engine", results.engine))
            if value
        ]
        return [Table(title="Time of a step", headers=("side", "ms per step", "quartiles"), rows=tuple(lines))]

    @staticmethod
    def findings(results: TrainResults) -> list[str]:
        """Return the ratio of both sides."""
        return [f"engine / bare loop: {with_quartiles(results.ratio, '{:.3f}'.format)}"]


def _compare(config: RunConfig) -> tuple[float, float, float]:
    """Return the seconds per step of the bare loop and of the engine, and the largest difference of their losses."""
    bare, engine = _bare(config), _Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        fit(config, get_task(config.recipe), Path(folder) / "run", resume=None, reporter=engine)
    difference = max(abs(loss - bare.losses[step]) / abs(loss) for step, loss in engine.losses.items())
    return bare.seconds_per_step, engine.seconds_per_step, difference


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
