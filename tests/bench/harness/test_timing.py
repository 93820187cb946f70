"""Timing on a clock that only moves when a contender runs."""

from __future__ import annotations

import gc

import pytest
import torch

from tost.bench.harness.device import stopwatch_of
from tost.bench.harness.timing import Plan, Spread, Trial, interleave, plan_repeats, ratios, spread, timed, warm_up


class FakeMachine:
    """A clock, and contenders that move it; `weather` slows down everything from one round on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.weather = 1.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now

    def contender(self, name: str, *seconds: float) -> Trial:
        remaining = list(seconds)

        def run() -> None:
            self.log.append(name)
            self.now += self.weather * (remaining.pop(0) if len(remaining) > 1 else remaining[0])

        def reset() -> None:
            self.now += 1000.0  # must never be seen in a measured time

        return Trial(run, reset)


@pytest.fixture
def machine():
    return FakeMachine()


def test_spread_is_median_and_quartiles():
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(median=3.0, lower=2.0, upper=4.0, count=5)
    assert spread([2.0]) == Spread(median=2.0, lower=2.0, upper=2.0, count=1)


def test_interleave_times_the_run_and_not_the_reset(machine):
    trials = {"limit": machine.contender("limit", 2.0), "tost": machine.contender("tost", 3.0)}
    rounds = interleave(trials, repeats={"limit": 4, "tost": 4}, clock=machine.clock)
    assert rounds == [pytest.approx({"limit": 2.0, "tost": 3.0})] * 4


def test_interleave_runs_everybody_once_per_round_in_changing_order(machine):
    names = ["a", "b", "c", "d"]
    trials = {name: machine.contender(name, 1.0) for name in names}
    interleave(trials, repeats=dict.fromkeys(names, 20), seed=3, clock=machine.clock)
    orders = [tuple(machine.log[start : start + 4]) for start in range(0, 80, 4)]
    assert all(sorted(order) == names for order in orders)
    assert len(set(orders)) > 5
    first, machine.log = machine.log, []
    interleave(trials, repeats=dict.fromkeys(names, 20), seed=3, clock=machine.clock)
    assert machine.log == first


def test_a_rare_contender_is_spread_over_the_rounds(machine):
    trials = {name: machine.contender(name, 1.0) for name in ("limit", "slow")}
    rounds = interleave(trials, repeats={"limit": 12, "slow": 3}, clock=machine.clock)
    assert [index for index, seconds in enumerate(rounds) if "slow" in seconds] == [3, 7, 11]


def test_ratios_within_a_round_survive_bad_weather(machine):
    trials = {"limit": machine.contender("limit", 2.0), "tost": machine.contender("tost", 3.0)}
    rounds = interleave(trials, repeats={"limit": 5, "tost": 3}, clock=machine.clock)
    machine.weather = 7.0
    rounds += interleave(trials, repeats={"limit": 5, "tost": 3}, clock=machine.clock)
    assert ratios(rounds, "tost", "limit") == pytest.approx([1.5] * 6)


def test_interleave_restores_garbage_collection(machine):
    def fail() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave({"a": Trial(fail, lambda: None)}, repeats={"a": 1}, clock=machine.clock)
    assert gc.isenabled()


def test_warm_up_does_not_take_compilation_for_speed(machine):
    warmup = warm_up(machine.contender("compiled", 30.0, 0.5, 0.4), runs=3, clock=machine.clock)
    assert (warmup.runs, warmup.first_seconds, warmup.estimate_seconds) == pytest.approx((3, 30.0, 0.4))


def test_warm_up_repeats_a_slow_contender_only_once(machine):
    assert warm_up(machine.contender("slow", 4.0), runs=5, clock=machine.clock).runs == 2
    assert warm_up(machine.contender("slow", 4.0), runs=1, clock=machine.clock).estimate_seconds == 4.0


@pytest.mark.parametrize(
    ("estimates", "expected"),
    [
        # An ordinary case: everybody takes part in every round.
        ({"limit": 0.1, "tost": 0.1, "sdpa": 0.2}, {"limit": 30, "tost": 30, "sdpa": 30}),
        # A short one: more rounds, up to ten times as many.
        ({"limit": 0.02, "tost": 0.02}, {"limit": 100, "tost": 100}),
        ({"limit": 1e-5, "tost": 1e-5}, {"limit": 300, "tost": 300}),
        # A slow contender takes part less often, though never less than three times; limit and tost always do.
        ({"limit": 2.0, "tost": 2.0, "sdpa": 2.0}, {"limit": 30, "tost": 30, "sdpa": 10}),
        ({"limit": 2.0, "tost": 2.0, "sdpa": 9.0}, {"limit": 30, "tost": 30, "sdpa": 3}),
    ],
)
def test_plan_repeats(estimates, expected):
    plan = Plan(repeats=30, case_seconds=4.0, contender_seconds=20.0)
    assert plan_repeats(estimates, always={"limit", "tost"}, plan=plan) == expected


def test_standard_plan_meets_our_own_rule():
    assert Plan().repeats >= 20


def test_a_gpu_times_by_its_own_events(monkeypatch):
    """A stand-in that notes what is asked of the GPU, in which order."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("end")

        def elapsed_time(self, end):
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    trial = Trial(lambda: log.append("run"), lambda: log.append("reset"), stopwatch_of("cuda"))
    assert timed(trial, clock=pytest.fail) == 0.25
    assert log == ["wait", "record", "run", "record", "end", "reset"]
    assert stopwatch_of("cpu") is None
