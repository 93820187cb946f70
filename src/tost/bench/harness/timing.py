"""Timing for noisy machines: contenders take turns, and are compared within a turn.

Every round runs each contender once, in an order that is shuffled anew. Whatever slows the machine down for a while
then slows all of them, and the ratio of two times of one round hardly changes. Reports show the median of these ratios,
and the ratio of the two medians beside it as a check.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

Round = dict[str, float]
"""Seconds by contender; a contender that sat this round out is absent."""

Clock = Callable[[], float]

Stopwatch = Callable[[Callable[[], object]], float]
"""Returns the seconds of a call."""


def no_reset() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure.

    Attributes:
        repeats: Least number of rounds; the contenders that are always timed run this often whatever they cost.
        warmup: Runs of each contender before the first round.
        case_seconds: Short cases get more rounds, up to ten times `repeats`, until about this much time is used.
        contender_seconds: Time after which the other contenders stop taking part, though never before three rounds.
        skip_seconds: A contender whose single run is expected to take longer is left out.
        seed: Seed of the inputs and of the order within the rounds.
    """

    repeats: int = 30
    warmup: int = 3
    case_seconds: float = 4.0
    contender_seconds: float = 20.0
    skip_seconds: float = 20.0
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """One contender, ready to be timed.

    Attributes:
        run: What is timed.
        reset: Tidies up after the clock has stopped.
        stopwatch: Times the run, where a device has a clock of its own; None for that of the processor.
    """

    run: Callable[[], object]
    reset: Callable[[], None] = no_reset
    stopwatch: Stopwatch | None = None


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """What the untimed runs of one contender showed."""

    runs: int
    first_seconds: float
    estimate_seconds: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and quartiles of `count` values."""

    median: float
    lower: float
    upper: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of at least one value."""
    if len(values) == 1:
        return Spread(median=values[0], lower=values[0], upper=values[0], count=1)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=median, lower=lower, upper=upper, count=len(values))


def spread_of(rounds: Sequence[Round], name: str) -> Spread:
    """Return the median and the quartiles of a contender's times."""
    return spread([seconds[name] for seconds in rounds if name in seconds])


def timed(trial: Trial, clock: Clock = time.perf_counter) -> float:
    """Return the seconds of one run."""
    seconds = _by_clock(trial.run, clock) if trial.stopwatch is None else trial.stopwatch(trial.run)
    trial.reset()
    return seconds


def _by_clock(run: Callable[[], object], clock: Clock) -> float:
    start = clock()
    # The result must outlive the second reading of the clock: giving its memory back is no part of the computation.
    result = run()
    seconds = clock() - start
    del result
    return seconds


def warm_up(trial: Trial, *, runs: int, clock: Clock = time.perf_counter) -> Warmup:
    """Run a contender a few times and estimate what one run costs.

    The first run may include compilation, so it only counts when there is no other. Runs of more than a second are not
    repeated more than once.

    Args:
        trial: The contender.
        runs: Most runs to make, at least one.
        clock: Source of seconds.

    Returns:
        The number of runs made, the time of the first and the time of the fastest later one.
    """
    seconds: list[float] = []
    while len(seconds) < runs and not (len(seconds) > 1 and seconds[-1] > 1.0):
        seconds.append(timed(trial, clock))
    return Warmup(runs=len(seconds), first_seconds=seconds[0], estimate_seconds=min(seconds[1:] or seconds))


def plan_repeats(estimates: Mapping[str, float], *, always: Collection[str], plan: Plan) -> dict[str, int]:
    """Decide how often each contender runs.

    Args:
        estimates: Seconds of one run, by contender.
        always: Contenders that take part in every round.
        plan: Time budgets.

    Returns:
        The number of runs by contender.
    """
    affordable = int(plan.case_seconds / max(sum(estimates.values()), 1e-9))
    rounds = min(max(plan.repeats, affordable), 10 * plan.repeats)
    repeats = {}
    for name, seconds in estimates.items():
        limit = rounds if name in always else max(3, int(plan.contender_seconds / max(seconds, 1e-9)))
        repeats[name] = min(rounds, limit)
    return repeats


def interleave(
    trials: Mapping[str, Trial], *, repeats: Mapping[str, int], seed: int = 0, clock: Clock = time.perf_counter
) -> list[Round]:
    """Time the contenders in rounds.

    A contender with fewer repeats than there are rounds takes part in rounds spread evenly over the whole time, so that
    it is slowed down as much as the others.

    Args:
        trials: Contenders by name.
        repeats: How often each of them runs; the largest number is the number of rounds.
        seed: Seed of the order within the rounds.
        clock: Source of seconds.

    Returns:
        The rounds in the order they were run.
    """
    total = max(repeats.values())
    order = random.Random(seed)
    rounds: list[Round] = []
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(total):
            names = [name for name in trials if (index + 1) * repeats[name] // total > index * repeats[name] // total]
            order.shuffle(names)
            rounds.append({name: timed(trials[name], clock) for name in names})
    finally:
        if was_enabled:
            gc.enable()
    return rounds


def ratios(rounds: Sequence[Round], name: str, base: str) -> list[float]:
    """Return ``name / base`` for each round in which both ran."""
    return [seconds[name] / seconds[base] for seconds in rounds if name in seconds and base in seconds]
