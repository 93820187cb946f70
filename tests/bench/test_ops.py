from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tost.bench.harness.timing import Plan
from tost.bench.ops import run as ops
from tost.bench.ops.cases import Case, Mode, Op
from tost.bench.ops.contenders import CONTENDERS, Contender
from tost.bench.ops.run import Measurements, measure, measure_case, measure_kept

PLAN = Plan(repeats=3, case_seconds=0.0)
CASE = Case(op=Op.TSSA, batch=2, tokens=16, width=12, heads=3)
EAGER = [contender for contender in CONTENDERS if not contender.compiled]


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, Case]] = []

    def started(self, case: Case) -> None:
        self.events.append(("started", case))

    def finished(self, case: Case, measurements: Measurements) -> None:
        assert any(row.case == case for row in measurements.rows)
        self.events.append(("finished", case))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_measure_case_forward():
    rows = measure_case(CASE, plan=PLAN, contenders=EAGER)
    assert [row.contender for row in rows] == [contender.name for contender in EAGER]
    for row in rows:
        assert row.seconds.count == row.ratio.count == 3
        assert row.warmup.runs == PLAN.warmup
        assert row.kept is None
        assert row.ratio_of_medians > 0
    assert rows[0].ratio.median == rows[0].ratio_of_medians == 1


def test_measure_case_forward_and_backward_measures_memory():
    rows = {row.contender: row for row in measure_case(replace(CASE, mode=Mode.FWD_BWD), plan=PLAN, contenders=EAGER)}
    size = 2 * 16 * 12 * 4
    assert rows["limit"].kept == 2 * size  # the inputs of the two projections
    assert rows["limit"].kept < rows["tost"].kept < rows["paper eager"].kept


def test_a_trial_leaves_no_gradient_behind():
    layer, x = nn.Linear(12, 12), torch.randn(2, 16, 12, requires_grad=True)
    trial = ops._trial(layer, x, torch.ones(2, 16, 12), replace(CASE, mode=Mode.FWD_BWD))
    trial.run()
    assert x.grad is not None
    assert layer.weight.grad is not None
    trial.reset()
    assert x.grad is None
    assert layer.weight.grad is None


def test_forward_runs_record_no_graph():
    layer, x = nn.Linear(12, 12), torch.randn(2, 16, 12)
    assert not ops._trial(layer, x, x, CASE).run().requires_grad


def test_a_quadratic_contender_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(ops, "_PROBE_TOKENS", 4)
    rows = measure_case(CASE, plan=replace(PLAN, skip_seconds=0.0), contenders=EAGER)
    (row,) = [row for row in rows if row.contender == "sdpa"]
    assert row.seconds is None
    assert row.note.startswith("skipped: about")
    assert "expected from 4 tokens" in row.note


class Broken(nn.Module):
    def forward(self, x):
        raise RuntimeError("no compiler found\nsecond line")


@pytest.mark.parametrize("compiled", [True, False])
def test_only_a_compiled_contender_may_fail(compiled):
    broken = Contender(name="broken", summary="", build=lambda case, ours: Broken(), compiled=compiled)
    if not compiled:
        with pytest.raises(RuntimeError, match="no compiler"):
            measure_case(CASE, plan=PLAN, contenders=[*EAGER, broken])
        return
    row = measure_case(CASE, plan=PLAN, contenders=[*EAGER, broken])[-1]
    assert (row.seconds, row.note) == (None, "could not run: RuntimeError: no compiler found")


def test_measure_kept_shows_what_the_operators_keep():
    rows = {row.implementation: row for row in measure_kept(replace(CASE, tokens=256))}
    assert rows["torch"].input_bytes == 2 * 256 * 12 * 4
    assert rows["torch"].input_bytes <= rows["torch"].bytes < rows["paper eager"].bytes


def test_measure_tells_the_watcher_and_keeps_all_rows():
    cases, measurements, recorder = [CASE, replace(CASE, mode=Mode.FWD_BWD)], Measurements(), Recorder()
    measure(cases, plan=PLAN, watcher=recorder, into=measurements, contenders=EAGER)
    assert measurements.complete
    assert recorder.events == [(event, case) for case in cases for event in ("started", "finished")]
    assert len(measurements.rows) == 2 * len(EAGER)
    assert {row.case for row in measurements.kept} == {CASE}


def test_measure_keeps_finished_cases_when_interrupted(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    measurements = Measurements()
    monkeypatch.setattr(ops, "measure_kept", interrupt)
    cases = [CASE, replace(CASE, mode=Mode.FWD_BWD)]
    measure(cases, plan=PLAN, watcher=Recorder(), into=measurements, contenders=EAGER)
    assert not measurements.complete
    assert {row.case for row in measurements.rows} == {CASE}


@pytest.mark.slow
def test_compiled_contender_runs_and_keeps_memory():
    rows = measure_case(replace(CASE, mode=Mode.FWD_BWD), plan=PLAN)
    (row,) = [row for row in rows if row.contender == "paper compiled"]
    assert row.seconds is not None, row.note
    assert row.kept > 0
