"""What packing costs an operator, and what it saves a training run.

The operators run on many packed sequences and on one with as many tokens, in turns. Two copies of a classifier take the
same training steps on the same reviews, in turns: one on a padded batch, the other on a packed one. Padding goes to the
longest review of each batch, which is the least that it can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tost
from tost._text import Table
from tost.bench.harness.gate import Check, GateResult
from tost.bench.harness.measurement import Measurement
from tost.bench.harness.table import with_quartiles
from tost.bench.harness.timing import Spread, Trial, interleave, ratios, spread, spread_of, timed
from tost.bench.ops.cases import Op
from tost.bench.packing.cases import PackingScale, Pass
from tost.data import Batch, make_loader
from tost.recipes import get_task, load_config
from tost.testing import relative_rms
from tost.train.optim import build_optimizer
from tost.train.task import Task

HEADS = {Op.TSSA: (8, 48), Op.CAUSAL_TSSA: (12, 64)}
"""Heads and their width."""
FUNCTIONS: dict[Op, Callable[..., Tensor]] = {Op.TSSA: tost.tssa, Op.CAUSAL_TSSA: tost.causal_tssa}
BARS = {"operators": 1.15, "training": 1.6, "losses": 1e-5}
"""Goals: packed / single at most, padded / packed at least, difference of losses at most."""


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """Seconds of an operator on packed sequences and on a single one, and their ratio in each round."""

    operator: Op
    timed: Pass
    packed: Spread
    single: Spread
    ratio: Spread


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """Training on padded and on packed batches.

    Attributes:
        steps: Steps of each side; the first is not timed.
        padded: Seconds per step.
        packed: Seconds per step.
        ratio: Padded over packed, step by step.
        padding: Share of the padded batches that is padding.
        losses: Loss of each padded step.
        difference: Largest relative difference to the loss of the packed step.
    """

    steps: int
    padded: Spread
    packed: Spread
    ratio: Spread
    padding: float
    losses: list[float]
    difference: float


@dataclass(kw_only=True)
class PackingResults:
    """All that was measured."""

    operators: list[OperatorRow] = field(default_factory=list)
    training: TrainingRow | None = None


class PackingMeasurement(Measurement[PackingScale, PackingResults]):
    """The benchmark `tost bench packing`."""

    results = PackingResults
    heading = "Packed sequences"
    checked = "packed sequences with each of them alone"

    def check(self) -> GateResult:
        """Compare both operators on packed sequences with each sequence alone."""
        return GateResult(checks=tuple(_check(operator, self.scale) for operator in Op))

    @property
    def steps(self) -> int:
        """The operators' cases, and one for the training."""
        return len(self.scale.cases) + (self.scale.data is not None)

    def measure(self, results: PackingResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Time the operators, then the training."""
        for operator, passes in self.scale.cases:
            watch(f"{operator}, {passes}")
            row = _time_operator(operator, passes, self.scale)
            results.operators.append(row)
            yield f"{operator}, {passes}: packed / single {with_quartiles(row.ratio)}"
        if self.scale.data is not None:
            watch(f"{self.scale.steps} training steps of each side")
            results.training = _time_training(self.scale)
            yield f"training: padded / packed {with_quartiles(results.training.ratio)}"

    @staticmethod
    def tables(results: PackingResults) -> list[Table]:
        """Return the times of both parts."""
        lines = [
            (f"{row.operator}, {row.timed}", *(f"{1e3 * x.median:.2f}" for x in (row.packed, row.single)),
             with_quartiles(row.ratio))
            for row in results.operators
        ]  # fmt: skip
        headers = ("call", "packed, ms", "single, ms", "packed / single")
        tables = [Table(title="Operators on packed sequences", headers=headers, rows=tuple(lines))]
        if (row := results.training) is not None:
            times = [f"{1e3 * x.median:.0f}" for x in (row.padded, row.packed)]
            cells = (*times, with_quartiles(row.ratio), f"{row.padding:.0%}", f"{row.difference:.1e}")
            sides = ("padded, ms per step", "packed, ms per step", "padded / packed", "padding", "losses differ by")
            tables.append(Table(title="Training on reviews", headers=sides, rows=(cells,), labels=0))
        return tables

    @staticmethod
    def findings(results: PackingResults) -> list[str]:
        """Return the numbers beside their goals."""
        found = []
        if results.operators:
            worst = max(row.ratio.median for row in results.operators)
            found.append(f"an operator takes at most {worst:.2f} of its time; the goal is {BARS['operators']}")
        if (row := results.training) is not None:
            found.append(f"training is {row.ratio.median:.2f} times as fast; the goal is {BARS['training']}")
            found.append(f"losses differ by at most {row.difference:.1e}; the goal is {BARS['losses']:g}")
        return found


def _tokens(operator: Op, scale: PackingScale) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of a call, its temperature and its cu_seqlens."""
    H, D = HEADS[operator]
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(1, scale.sequences * scale.length, H, D, generator=generator)
    return w, torch.ones(H), scale.length * torch.arange(scale.sequences + 1, dtype=torch.int32)


def _check(operator: Op, scale: PackingScale) -> Check:
    w, temperature, cu_seqlens = _tokens(operator, scale)
    run = FUNCTIONS[operator]
    alone = torch.cat([run(part, temperature) for part in torch.split(w, scale.length, dim=1)], dim=1)
    return Check(name=operator, error=relative_rms(run(w, temperature, cu_seqlens=cu_seqlens), alone), bound=1e-6)


def _time_operator(operator: Op, passes: Pass, scale: PackingScale) -> OperatorRow:
    w, temperature, cu_seqlens = _tokens(operator, scale)
    cotangent = torch.randn_like(w)
    both = passes is Pass.BOTH
    w.requires_grad_(both)

    def run(**packed: Tensor) -> Tensor:
        y = FUNCTIONS[operator](w, temperature, **packed)
        return torch.autograd.grad(y, w, cotangent)[0] if both else y

    trials = {"packed": Trial(partial(run, cu_seqlens=cu_seqlens)), "single": Trial(run)}
    for trial in trials.values():
        timed(trial)
    rounds = interleave(trials, repeats=dict.fromkeys(trials, scale.repeats))
    return OperatorRow(
        operator=operator,
        timed=passes,
        packed=spread_of(rounds, "packed"),
        single=spread_of(rounds, "single"),
        ratio=spread(ratios(rounds, "packed", "single")),
    )


class _Side:
    """One of the two training runs: its batches, its model and its optimizer."""

    def __init__(self, padding: str, scale: PackingScale, model: nn.Module | None) -> None:
        overrides = [f"data.path={scale.data}", f"data.options.length={scale.max_length}"]
        overrides += [
            "data.options.eos=false",
            "data.options.hold_out=0",
            f"data.options.limit={scale.steps * scale.batch_size}",
        ]
        overrides += [f"data.options.padding={padding}", "model.dropout=0", "model.attention_dropout=0"]
        config = load_config(scale.config, overrides)
        self.task: Task = get_task(config.recipe)
        bundle = self.task.build_data(config)
        self.batches = iter(make_loader(bundle.train, batch_size=scale.batch_size, seed=0))
        torch.manual_seed(0)
        self.model = self.task.build_model(config, bundle) if model is None else deepcopy(model)
        self.optimizer = build_optimizer(self.model.train(), config.optim)

    def step(self, batch: Batch) -> tuple[float, float]:
        """Take a step; return its seconds and the loss before it."""
        start = time.perf_counter()
        loss = self.task.compute(self.model, batch).loss / self.task.terms(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start, loss.item()


def _time_training(scale: PackingScale) -> TrainingRow:
    padded = _Side("right", scale, None)
    packed = _Side("none", scale, padded.model)
    times: list[tuple[float, float]] = []
    losses: list[tuple[float, float]] = []
    real = total = 0
    for _ in range(scale.steps):
        batch = _trimmed(next(padded.batches))
        real, total = real + int(batch["mask"].sum()), total + batch["mask"].numel()
        (long, loss), (short, other) = padded.step(batch), packed.step(next(packed.batches))
        times.append((long, short))
        losses.append((loss, other))
    timed_steps = times[1:]
    return TrainingRow(
        steps=scale.steps,
        padded=spread([long for long, _ in timed_steps]),
        packed=spread([short for _, short in timed_steps]),
        ratio=spread([long / short for long, short in timed_steps]),
        padding=1 - real / total,
        losses=[loss for loss, _ in losses],
        difference=max(abs(loss - other) / abs(loss) for loss, other in losses),
    )


def _trimmed(batch: Batch) -> dict[str, Any]:
    """Return a batch that is padded to its longest sequence only."""
    longest = int(batch["mask"].sum(dim=1).max())
    return {**batch, "inputs": batch["inputs"][:, :longest], "mask": batch["mask"][:, :longest]}
