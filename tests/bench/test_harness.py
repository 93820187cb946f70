"""Timing on a clock that only moves when a contender runs, memory, processes, gates and result files."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tost.bench import harness
from tost.bench.harness import (
    Check,
    Gate,
    Report,
    Spread,
    Trial,
    failure,
    interleave,
    kept_bytes,
    layer_trial,
    pivot,
    plan_repeats,
    ratios,
    run_in_process,
    spread,
    warm_up,
    watch_peak,
    with_quartiles,
)
from tost.bench.ops import Ops
from tost.errors import TostError


class FakeMachine:
    """Contenders that move the clock; `weather` slows down everything from one round on."""

    def __init__(self) -> None:
        self.now, self.weather = 0.0, 1.0
        self.log: list[str] = []

    def contender(self, name: str, *seconds: float) -> Trial:
        remaining = list(seconds)

        def run() -> None:
            self.log.append(name)
            self.now += self.weather * (remaining.pop(0) if len(remaining) > 1 else remaining[0])

        def reset() -> None:
            self.now += 1000.0  # must never be seen in a measured time

        return Trial(run, reset)


@pytest.fixture
def machine(monkeypatch):
    found = FakeMachine()
    monkeypatch.setattr(time, "perf_counter", lambda: found.now)
    return found


def test_spread_is_median_and_quartiles():
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0, 1)


def test_interleave_times_the_run_and_not_the_reset(machine):
    trials = {"limit": machine.contender("limit", 2.0), "tost": machine.contender("tost", 3.0)}
    rounds = interleave(trials, {"limit": 4, "tost": 4})
    assert rounds == [pytest.approx({"limit": 2.0, "tost": 3.0})] * 4


def test_interleave_runs_everybody_once_per_round_in_changing_order(machine):
    names = ["a", "b", "c", "d"]
    interleave({name: machine.contender(name, 1.0) for name in names}, dict.fromkeys(names, 20), seed=3)
    orders = [tuple(machine.log[start : start + 4]) for start in range(0, 80, 4)]
    assert all(sorted(order) == names for order in orders)
    assert len(set(orders)) > 5


def test_slow_contenders_take_part_in_rounds_spread_over_the_whole_time(machine):
    trials = {"fast": machine.contender("fast", 1.0), "slow": machine.contender("slow", 9.0)}
    rounds = interleave(trials, {"fast": 12, "slow": 3})
    assert [index for index, seconds in enumerate(rounds) if "slow" in seconds] == [3, 7, 11]


def test_ratios_survive_a_machine_that_becomes_slower(machine):
    trials = {"limit": machine.contender("limit", 1.0), "tost": machine.contender("tost", 1.5)}
    rounds = interleave(trials, dict.fromkeys(trials, 4))
    machine.weather = 7.0
    rounds += interleave(trials, dict.fromkeys(trials, 4))
    assert ratios(rounds, "tost", "limit") == pytest.approx([1.5] * 8)


def test_garbage_collection_is_off_while_times_are_taken_and_restored(machine):
    seen = []
    interleave({"a": Trial(lambda: seen.append(gc.isenabled()))}, {"a": 2})
    assert (seen, gc.isenabled()) == ([False, False], True)


def test_warm_up_does_not_repeat_slow_runs(machine):
    assert len(warm_up(machine.contender("a", 0.1), runs=5)) == 5
    assert len(warm_up(machine.contender("a", 3.0), runs=5)) == 2


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1e-4, {"limit": 300, "other": 300}), (0.1, {"limit": 39, "other": 39}), (4.0, {"limit": 30, "other": 5})],
)
def test_short_cases_get_more_rounds_and_slow_contenders_fewer(seconds, expected):
    budget = {"least": 30, "case_seconds": 4.0, "most_seconds": 20.0}
    assert plan_repeats({"limit": 1e-4, "other": seconds}, always=("limit",), **budget) == expected


def test_layer_trial_runs_both_passes_and_clears_gradients():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    trial = layer_trial(layer, x, torch.ones(4, 2))
    trial.run()
    assert x.grad is not None
    trial.reset()
    assert (x.grad, layer.weight.grad) == (None, None)
    assert layer_trial(layer, x, None).run().grad_fn is None


def test_kept_bytes_counts_storages_once_and_leaves_parameters_out():
    x, weight = torch.ones(1000, requires_grad=True), torch.ones(1000, requires_grad=True)
    assert kept_bytes(lambda: x.exp()) == 4000
    assert kept_bytes(lambda: (x * weight).sum(), excluding=[weight]) == 4000
    assert kept_bytes(lambda: x[:10] * x[10:20]) == 4000  # a view holds its whole storage


def test_peak_sees_memory_that_is_freed_again():
    with watch_peak() as peak:
        torch.ones(32 << 20).add_(1)
    assert peak[0] > 100 << 20


@dataclass(frozen=True)
class Sum:
    numbers: list[int]


def add(job: Sum) -> dict[str, int]:
    if not job.numbers:
        raise MemoryError
    return {"sum": sum(job.numbers), "threads": torch.get_num_threads()}


def test_a_function_runs_in_a_fresh_process():
    assert run_in_process(add, Sum([1, 2, 3]), label="adding") == {"sum": 6, "threads": torch.get_num_threads()}
    with pytest.raises(TostError, match=r"^adding: out of memory$"):
        run_in_process(add, Sum([]), label="adding")
    with pytest.raises(TostError, match=r"^adding: ended after 0 s$"):
        run_in_process(add, Sum([1]), label="adding", timeout=0.01)


@pytest.mark.parametrize(
    ("code", "errors", "expected"),
    [
        (-9, "", "ended by the system, as when memory runs out"),
        (1, "Traceback\nRuntimeError: can't allocate memory: 5 GB", "out of memory"),
        (3, "", "failed with code 3: no message"),
    ],
)
def test_reasons_of_failed_processes(code, errors, expected):
    assert failure(code, errors) == expected


def report(monkeypatch, *errors: float) -> Report:
    gate = Gate([Check(f"check {index}", error, 1e-3) for index, error in enumerate(errors)])
    monkeypatch.setattr(Ops, "check", lambda self: gate)
    return Ops(tokens=(16,), width=16, heads=2).open_report()


@pytest.mark.parametrize(
    ("errors", "passed"), [((0.0,), True), ((0.0, 1.0), False), ((float("nan"),), False), ((), False)]
)
def test_a_gate_passes_if_something_was_compared_and_nothing_failed(monkeypatch, errors, passed):
    made = report(monkeypatch, *errors)
    assert made.gate.passed is passed
    assert made.to_json()["gate"]["passed"] is passed


def test_no_number_leaves_a_report_behind_a_red_gate(monkeypatch, tmp_path):
    made = report(monkeypatch, 1.0)
    made.results["rows"].append({"seconds": 1.0})
    made.complete = True
    assert (made.to_json()["rows"], made.to_json()["complete"]) == ([], False)
    with pytest.raises(ValueError, match="green gate"):
        made.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_report_leaves_complete_files_alone(monkeypatch, tmp_path):
    made = report(monkeypatch, 0.0)
    monkeypatch.setattr(Ops, "pictures", lambda self, report: {".svg": b"<svg/>"})
    made.complete = True
    files = made.write(tmp_path)
    assert [file.suffix for file in files] == [".json", ".md", ".svg"]
    assert f"]({files[2].name})" in files[1].read_text()
    made.complete = False
    (partial,) = made.write(tmp_path)
    assert partial.name == f"{made.stem}.partial.json"
    assert json.loads(files[0].read_text())["complete"]
    assert not json.loads(partial.read_text())["complete"]
    made.complete = True
    made.write(tmp_path)
    assert not partial.exists()


@pytest.mark.parametrize(
    ("options", "theme"),
    [({}, "ops"), ({"repeats": 3}, "ops"), ({"tokens": (16,)}, "ops-selection"), ({"quick": True}, "ops-quick")],
)
def test_a_selection_has_files_of_its_own(options: dict[str, Any], theme):
    assert Ops(**options).theme == theme


def test_cells_and_pivots():
    assert with_quartiles(harness.plain(Spread(1.0, 0.5, 2.0, 9))) == "1.00 (0.50-2.00)"
    assert (with_quartiles(None), with_quartiles(harness.plain(Spread(1.0, 1.0, 1.0, 1)))) == ("-", "1.00")
    table = pivot("title", ["row"], [(("a",), "x", "1"), (("b",), "y", "2")])
    assert (table.headers, table.rows) == (("row", "x", "y"), [("a", "1", "-"), ("b", "-", "2")])
