"""Attention layers side by side, one process per point: time and memory, beside what the layers cost on paper.

The first four figures are the paper's: attention layers alone, forward, batch 1. Two are additional: whole base models,
for the paper's table of relative cost, and one layer alone in both passes. What would take too long or too much memory
is left out before it is tried, and its row has what was expected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tost.bench.attention.cases import CONTENDERS, PAPER_TOKENS, AttentionScale, Figure, Point
from tost.bench.attention.cost import Cost, point_cost
from tost.bench.attention.layers import build_layers
from tost.bench.harness.device import free_bytes, stopwatch_of
from tost.bench.harness.memory import keep_freed_memory, kept_bytes, watch_peak
from tost.bench.harness.passes import layer_trial
from tost.bench.harness.timing import Clock, Spread, Trial, interleave, ratios, spread, spread_of, timed, warm_up
from tost.bench.harness.worker import run_in_process
from tost.errors import TostError

_START_SECONDS = 30.0  # a process may take this long to load and to build its layers
_PAIRED = CONTENDERS[:2]
_SHORT = 16  # tokens of the pass that comes first, to load what is loaded on first use


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Point):
    """One contender at one size.

    Attributes:
        flops: Operations on paper.
        product_flops: Those in matrix products.
        bytes_moved: Bytes that go to and from main memory on paper.
        roofline_seconds: The least time that the machine's peaks allow for them.
        seconds: One pass; None if it was left out or failed.
        times_roofline: Measured time over the least; 1 would be the machine's peak.
        peak_bytes: By how much the memory of a fresh process grew during its first pass.
        kept_bytes: What the forward pass keeps for the backward pass; None without one.
        weight_bytes: Size of the parameters.
        note: Why something is missing, with what was expected.
    """

    flops: int
    product_flops: int
    bytes_moved: int
    roofline_seconds: float
    seconds: Spread | None = None
    times_roofline: float | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    weight_bytes: int | None = None
    note: str = ""


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


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The best that this machine does: operations per second in a matrix product, bytes per second in a copy."""

    flops_per_second: float
    bytes_per_second: float

    def bound(self, cost: Cost) -> float:
        """Return the seconds that nothing can beat: ``max(operations / rate, bytes / bandwidth)``.

        Data that a cache still holds need not be moved, so that short sequences may come below the second.
        """
        return max(cost.flops / self.flops_per_second, cost.moved / self.bytes_per_second)


@dataclass(kw_only=True)
class AttentionResults:
    """Everything measured so far."""

    elapsed_seconds: float = 0.0
    roofline: Roofline | None = None
    pairs: list[Pair] = field(default_factory=list)
    rows: list[AttentionRow] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A point, and for how long and where to measure it."""

    point: Point
    scale: AttentionScale


@dataclass(frozen=True, kw_only=True)
class PointUsage:
    """What a point took.

    Attributes:
        seconds: Timed passes.
        peak_bytes: By how much memory grew at most during a pass. Weights and input exist before, gradients do not.
        kept_bytes: What the forward pass keeps for the backward pass; None without one.
        weight_bytes: Size of the parameters.
    """

    seconds: tuple[float, ...]
    peak_bytes: int
    kept_bytes: int | None
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What to measure a device with: square matrices of `size` rows, and a copy that fits into no cache."""

    device: str = "cpu"
    size: int = 2048
    megabytes: int = 256


class Work:
    """The layers of a point, with their input.

    Args:
        point: What to build.
        device: Where.

    Attributes:
        trial: One pass, ready to be timed.
    """

    def __init__(self, point: Point, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.layers = build_layers(point).to(device).train(point.training)
        if point.whole:
            self.x = torch.randint(point.vocab_size, (1, point.tokens), device=device)
        else:
            self.x = torch.randn(1, point.tokens, point.width, device=device).requires_grad_(point.training)
        cotangent = torch.randn_like(self.x) if point.training else None
        self.training = point.training
        self.trial = layer_trial(self.layers, self.x, cotangent, stopwatch=stopwatch_of(device))

    def run_short(self) -> None:
        """Take a pass on the first few tokens."""
        with torch.set_grad_enabled(self.training):
            short = self.layers(self.x[:, :_SHORT])
            if self.training:
                short.sum().backward()
        self.trial.reset()

    def kept(self) -> int | None:
        """Return the bytes that a forward pass keeps for its backward pass; the input counts, parameters do not."""
        if not self.training:
            return None
        return kept_bytes(lambda: self.layers(self.x), excluding=self.layers.parameters())


def measure_point(job: Job) -> PointUsage:
    """Measure a point in this process.

    The first pass shows the memory, with a C library that returns freed blocks at once. A slow one is also the timed
    one. Otherwise the library keeps freed blocks from then on, as it would by itself, and passes are repeated.
    """
    scale = job.scale
    work = Work(job.point, scale.device)
    work.run_short()
    kept = work.kept()
    with watch_peak(scale.device) as peak:
        first = timed(work.trial)
    seconds = [first]
    if first <= scale.pass_seconds:
        keep_freed_memory()
        timed(work.trial)
        wanted = int(scale.pass_seconds / max(first, 1e-9))
        repeats = min(max(wanted, scale.least_repeats), scale.most_repeats)
        seconds = [timed(work.trial) for _ in range(repeats)]
    weights = sum(parameter.nbytes for parameter in work.layers.parameters())
    return PointUsage(seconds=tuple(seconds), peak_bytes=peak.growth, kept_bytes=kept, weight_bytes=weights)


def point_in_process(job: Job, *, timeout: float, limit_bytes: int | None = None) -> PointUsage:
    """Measure a point in a fresh process; see `run_in_process`."""
    label, device = job.point.label, job.scale.device
    return run_in_process(measure_point, job, label=label, timeout=timeout, device=device, limit_bytes=limit_bytes)


def measure_roofline(machine: Machine) -> Roofline:
    """Measure the machine: the best of several matrix products, and of several copies, in float32."""
    size, device = machine.size, machine.device
    left, right, result = (torch.randn(size, size, device=device) for _ in range(3))
    source, target = (torch.ones(machine.megabytes << 18, device=device) for _ in range(2))

    def best(call: Callable[[], object]) -> float:
        return min(timed(Trial(call, stopwatch=stopwatch_of(device))) for _ in range(12))

    product, copy = best(lambda: torch.mm(left, right, out=result)), best(lambda: target.copy_(source))
    return Roofline(flops_per_second=2 * size**3 / product, bytes_per_second=2 * source.nbytes / copy)


def roofline_in_process(device: str) -> Roofline:
    """Measure the machine in a fresh process.

    Raises:
        TostError: It failed.
    """
    # A GPU needs larger matrices to show what it can do.
    machine = Machine(device=device, size=8192 if device == "cuda" else 2048)
    return run_in_process(measure_roofline, machine, label="measuring the machine", timeout=120.0)


def measure_attention(
    scale: AttentionScale,
    roofline: Roofline,
    *,
    watch: Callable[[str], None],
    in_process: Callable[..., PointUsage] = point_in_process,
    clock: Clock = time.perf_counter,
) -> Iterator[AttentionRow]:
    """Measure one point after the other.

    Args:
        scale: What to measure, and for how long.
        roofline: The machine's peaks.
        watch: Called with a line when a point starts.
        in_process: Measures a point in a process of its own; see `point_in_process`.
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
        counts: dict[str, Any] = {"flops": cost.flops, "product_flops": cost.products, "bytes_moved": cost.moved}
        row = AttentionRow(**vars(point), **counts, roofline_seconds=roofline.bound(cost))
        # A contender goes on at the rate of its last point; the first of a line has only the machine's peaks to go by.
        rate = rates.get(point.series)
        expected = cost.flops / rate if rate else row.roofline_seconds
        if note := _refusal(scale, cost, expected, limit_bytes, clock() - started):
            yield replace(row, note=note)
            continue
        timeout = _START_SECONDS + 3 * scale.limit_seconds
        try:
            usage = in_process(Job(point=point, scale=scale), timeout=timeout, limit_bytes=limit_bytes)
            seconds = spread(usage.seconds)
            measured = {"seconds": seconds, "times_roofline": seconds.median / row.roofline_seconds}
            row = replace(row, **vars(usage) | measured)
        except TostError as error:
            reason = str(error).removeprefix(f"{point.label}: ")
            row = replace(row, note=f"{reason} (predicted {_seconds(expected)})")
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


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def measure_pairs(
    scale: AttentionScale, *, watch: Callable[[str], None], clock: Clock = time.perf_counter
) -> Iterator[Pair]:
    """Time one layer of ToST and of softmax attention in turns, at the length for which the paper states a ratio.

    Processes that run one after the other may find the machine differently busy; here a ratio compares two runs of one
    round.

    Args:
        scale: Gives the sizes of the figure `alone`; without it nothing is measured.
        watch: Called with a line when a pair starts.
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
            point = shape.point(Figure.ALONE, name, tokens=tokens, width=shape.widths[-1], training=training)
            trials[name] = Work(point, scale.device).trial
            warm_up(trials[name], runs=1, clock=clock)
        # The short one runs more often: the time of a single short run varies a lot.
        rounds = interleave(trials, repeats={_PAIRED[0]: 5 * scale.rounds, _PAIRED[1]: scale.rounds}, clock=clock)
        yield Pair(
            tokens=tokens,
            training=training,
            seconds={name: spread_of(rounds, name) for name in _PAIRED},
            ratio=spread(ratios(rounds, _PAIRED[1], _PAIRED[0])),
        )
