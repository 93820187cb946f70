"""Attention layers side by side, one process per point: time and memory, beside what the layers cost on paper.

The first four figures are the paper's: attention layers alone, forward, batch 1. Two are ours: whole base models, for
the paper's table of relative cost, and one layer alone in both passes. What would take too long or too much memory is
left out before it is tried, and its row says what was expected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import psutil
import torch

from tost.bench.attention.cases import CONTENDERS, PAPER_TOKENS, SUMMARIES, AttentionScale, Figure, Point
from tost.bench.attention.cost import Cost, point_cost
from tost.bench.attention.point import Job, Outcome, Roofline, Work, run_job
from tost.bench.harness.environment import Environment
from tost.bench.harness.gate import GateResult
from tost.bench.harness.timing import Clock, Spread, Trial, interleave, ratios, spread, warm_up
from tost.errors import ConfigError, TostError

__all__ = [
    "AttentionReport",
    "AttentionRow",
    "Pair",
    "choose_device",
    "free_bytes",
    "measure_attention",
    "measure_pairs",
]

_START_SECONDS = 30.0  # a process may take this long to load and to build its layers
_PAIRED = CONTENDERS[:2]


class RunJob(Protocol):
    """Measures a point elsewhere."""

    def __call__(self, job: Job, *, timeout: float) -> Outcome:
        """See `tost.bench.attention.point.run_job`."""


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """One contender at one size.

    Attributes:
        point: What was to be measured.
        cost: Operations and bytes on paper.
        bound_seconds: The least time that the machine's peaks allow for them.
        seconds: One pass; None if it was left out or failed.
        peak_bytes: By how much the memory of a fresh process grew during its first pass.
        kept_bytes: What the forward pass keeps for the backward pass; None without one.
        weight_bytes: Size of the parameters.
        note: Why something is missing, with what was expected.
    """

    point: Point
    cost: Cost
    bound_seconds: float
    seconds: Spread | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    weight_bytes: int | None = None
    note: str = ""

    @property
    def distance(self) -> float | None:
        """Measured time over the bound; 1 would be the machine's peak."""
        return self.seconds.median / self.bound_seconds if self.seconds else None

    def to_json(self) -> dict[str, object]:
        """Return one flat object of plain types."""
        return {
            **asdict(self.point),
            "flops": self.cost.flops,
            "product_flops": self.cost.products,
            "bytes_moved": self.cost.moved,
            "roofline_seconds": self.bound_seconds,
            "seconds": asdict(self.seconds) if self.seconds else None,
            "times_roofline": self.distance,
            "peak_bytes": self.peak_bytes,
            "kept_bytes": self.kept_bytes,
            "weight_bytes": self.weight_bytes,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class Pair:
    """ToST against softmax attention on the fused kernel, one layer each, taking turns in one process.

    Attributes:
        tokens: Length.
        training: Forward and backward; else forward alone.
        seconds: One pass, by contender.
        ratio: Time of softmax attention over that of ToST, from pairs of runs in one round.
    """

    tokens: int
    training: bool
    seconds: dict[str, Spread]
    ratio: Spread


@dataclass(kw_only=True)
class AttentionReport:
    """A measurement together with everything needed to judge it."""

    command: str
    environment: Environment
    gate: GateResult
    scale: AttentionScale
    theme: str = "attention"
    accelerator: str | None = None
    roofline: Roofline | None = None
    rows: list[AttentionRow] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    complete: bool = False
    elapsed_seconds: float = 0.0

    @property
    def stem(self) -> str:
        """File name without its ending: theme, hardware and month."""
        machine = self.environment.slug if self.accelerator is None else self.accelerator.lower().replace(" ", "-")
        return f"{self.theme}_{machine}_{self.environment.month}"

    @property
    def machine(self) -> str:
        """One line: hardware and versions."""
        return self.environment.summary + (f" | {self.accelerator}" if self.accelerator else "")

    def to_json(self) -> dict[str, object]:
        """Return one object of plain types; times are in seconds. Behind a red gate there are no times."""
        green = self.gate.passed
        shapes = {figure.value: asdict(shape) for figure, shape in self.scale.shapes.items()}
        return {
            "theme": self.theme,
            "complete": self.complete,
            "command": self.command,
            "elapsed_seconds": round(self.elapsed_seconds, 1),
            "environment": asdict(self.environment),
            "accelerator": self.accelerator,
            "gate": self.gate.to_json(),
            "scale": {**asdict(replace(self.scale, shapes={})), "shapes": shapes},
            "contenders": SUMMARIES,
            "roofline": asdict(self.roofline) if self.roofline and green else None,
            "pairs": [asdict(pair) for pair in self.pairs] if green else [],
            "rows": [row.to_json() for row in self.rows] if green else [],
        }


def choose_device(wanted: str) -> tuple[str, str | None]:
    """Return the device to use, and the name of the GPU if it is one.

    Args:
        wanted: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: There is no GPU, but one was asked for.
    """
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("--device cuda was given, but torch finds no CUDA device here; use --device cpu or auto.")
    if wanted == "cpu" or not present:
        return "cpu", None
    return "cuda", torch.cuda.get_device_name()


def free_bytes(device: str) -> int:
    """Return the memory that is free now."""
    if device == "cuda":
        free: int = torch.cuda.mem_get_info()[0]
        return free
    available: int = psutil.virtual_memory().available
    return available


def measure_attention(
    scale: AttentionScale,
    roofline: Roofline,
    *,
    watch: Callable[[str], None],
    in_process: RunJob = run_job,
    clock: Clock = time.perf_counter,
) -> Iterator[AttentionRow]:
    """Measure one point after the other.

    Args:
        scale: What to measure, and for how long.
        roofline: The machine's peaks.
        watch: Gets a line when a point starts.
        in_process: Measures a point in a process of its own.
        clock: Source of seconds.

    Yields:
        One row per point of `scale.points`, in their order.
    """
    started = clock()
    limit_bytes = scale.limit_bytes or free_bytes(scale.device) * 3 // 4
    rates: dict[tuple[Figure, str, bool], float] = {}
    for point in scale.points:
        watch(point.label)
        cost = point_cost(point)
        row = AttentionRow(point=point, cost=cost, bound_seconds=roofline.bound(cost))
        # A contender goes on at the rate of its last point; the first of a line has only the machine's peaks to go by.
        rate = rates.get(point.series)
        expected = cost.flops / rate if rate else row.bound_seconds
        if note := _refusal(scale, cost, expected, limit_bytes, clock() - started):
            yield replace(row, note=note)
            continue
        row = _measured(row, scale, limit_bytes, expected, in_process)
        if row.seconds:
            rates[point.series] = cost.flops / row.seconds.median
        yield row


def _refusal(scale: AttentionScale, cost: Cost, expected: float, limit_bytes: int, elapsed: float) -> str:
    """Return why a point is left out, or an empty string."""
    if expected > scale.limit_seconds:
        return f"predicted {expected:.0f} s"
    if cost.held > limit_bytes:
        return f"predicted {cost.held / 1e9:.1f} GB"
    if elapsed + expected > scale.total_seconds:
        return f"no time left, predicted {_seconds(expected)}"
    return ""


def _measured(
    row: AttentionRow, scale: AttentionScale, limit_bytes: int, expected: float, in_process: RunJob
) -> AttentionRow:
    job = Job(
        point=row.point,
        threads=torch.get_num_threads(),
        device=scale.device,
        pass_seconds=scale.pass_seconds,
        least_repeats=scale.least_repeats,
        most_repeats=scale.most_repeats,
        limit_bytes=limit_bytes,
    )
    try:
        outcome = in_process(job, timeout=_START_SECONDS + 3 * scale.limit_seconds)
    except TostError as error:
        return replace(row, note=f"{str(error).removeprefix(f'{row.point.label}: ')} (predicted {_seconds(expected)})")
    return replace(
        row,
        seconds=spread(outcome.seconds),
        peak_bytes=outcome.peak_bytes,
        kept_bytes=outcome.kept_bytes,
        weight_bytes=outcome.weight_bytes,
    )


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def measure_pairs(
    scale: AttentionScale, *, watch: Callable[[str], None], clock: Clock = time.perf_counter
) -> Iterator[Pair]:
    """Time one layer of ToST and of softmax attention in turns, at the length that the paper speaks of.

    Processes that run one after the other may meet different weather; here a ratio compares two runs of one round.

    Args:
        scale: Gives the sizes of the figure `alone`; without it nothing is measured.
        watch: Gets a line when a pair starts.
        clock: Source of seconds.

    Yields:
        One pair for each kind of pass.
    """
    shape = scale.shapes.get(Figure.ALONE)
    if shape is None or scale.rounds < 1:
        return
    tokens = PAPER_TOKENS if PAPER_TOKENS in shape.tokens else max(shape.tokens)
    for training in shape.passes:
        watch(f"{' and '.join(_PAIRED)} in turns, N={tokens}{', training step' * training}")
        trials = {}
        for name in _PAIRED:
            point = Point(
                figure=Figure.ALONE,
                contender=name,
                tokens=tokens,
                width=shape.widths[-1],
                heads=shape.heads,
                depth=1,
                training=training,
            )
            work = Work(point, scale.device)
            trials[name] = Trial(_waiting(work, scale.device), work.reset)
            warm_up(trials[name], runs=1, clock=clock)
        # The short one runs more often: a single run of milliseconds says little.
        rounds = interleave(trials, repeats={_PAIRED[0]: 5 * scale.rounds, _PAIRED[1]: scale.rounds}, clock=clock)
        yield Pair(
            tokens=tokens,
            training=training,
            seconds={name: spread([times[name] for times in rounds if name in times]) for name in _PAIRED},
            ratio=spread(ratios(rounds, _PAIRED[1], _PAIRED[0])),
        )


def _waiting(work: Work, device: str) -> Callable[[], object]:
    if device != "cuda":
        return work.run

    def run() -> object:
        result = work.run()
        torch.cuda.synchronize()
        return result

    return run
