from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tost.bench.harness.timing import Plan
from tost.bench.ops import run as ops
from tost.bench.ops import tables
from tost.bench.ops.cases import Case, Mode, Op, OpsScale
from tost.bench.ops.contenders import CONTENDERS, Contender
from tost.bench.ops.run import OpsResults, measure_case, measure_kept
from tost.bench.ops.tables import OpsMeasurement

PLAN = Plan(repeats=3, case_seconds=0.0)
CASE = Case(op=Op.TSSA, batch=2, tokens=16, width=12, heads=3)
EAGER = [contender for contender in CONTENDERS if not contender.compiled]


SCALE = OpsScale(op=(Op.TSSA,), tokens=(16,), batch=2, width=12, heads=3, repeats=3, compile=False, case_seconds=0.0)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_measure_case_forward():
    rows = measure_case(CASE, plan=PLAN, contenders=EAGER)
    assert [row.contender for row in rows] == [contender.name for contender in EAGER]
    for row in rows:
        assert row.seconds.count == row.ratio.count == 3
        assert row.warmup_runs == PLAN.warmup
        assert row.kept_bytes is None
        assert row.ratio_of_medians > 0
    assert rows[0].ratio.median == rows[0].ratio_of_medians == 1


def test_measure_case_forward_and_backward_measures_memory():
    rows = {row.contender: row for row in measure_case(replace(CASE, mode=Mode.FWD_BWD), plan=PLAN, contenders=EAGER)}
    size = 2 * 16 * 12 * 4
    assert rows["limit"].kept_bytes == 2 * size  # the inputs of the two projections
    assert rows["limit"].kept_bytes < rows["tost"].kept_bytes < rows["paper eager"].kept_bytes


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


def test_measure_announces_the_cases_and_keeps_all_rows():
    results, started = OpsResults(), []
    summaries = list(OpsMeasurement(SCALE).measure(results, started.append))
    assert started == [case.label for case in SCALE.cases] == [CASE.label, replace(CASE, mode=Mode.FWD_BWD).label]
    assert len(summaries) == OpsMeasurement(SCALE).steps == 2
    assert all(summary.startswith("times the limit: tost ") for summary in summaries)
    assert len(results.rows) == 2 * len(EAGER)
    assert {row.case for row in results.rows} == set(SCALE.cases)
    assert {(row.op, row.tokens) for row in results.operator_kept_bytes} == {("tssa", 16)}


def test_a_case_that_is_interrupted_leaves_no_rows(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    results = OpsResults()
    monkeypatch.setattr(tables, "measure_kept", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(OpsMeasurement(SCALE).measure(results, lambda _: None))
    assert {row.case for row in results.rows} == {CASE}


@pytest.mark.slow
def test_compiled_contender_runs_and_keeps_memory():
    rows = measure_case(replace(CASE, mode=Mode.FWD_BWD), plan=PLAN)
    (row,) = [row for row in rows if row.contender == "paper compiled"]
    assert row.seconds is not None, row.note
    assert row.kept_bytes > 0
