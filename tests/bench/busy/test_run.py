"""Work beside busy processes: a real, short measurement, and what becomes of the processes it starts."""

import os

import pytest

from tests.bench.reports import report
from tost.bench.busy.cases import BusyScale, Place, Work
from tost.bench.busy.run import BusyJob, BusyMeasurement, BusyResults, BusyRow, _conditions, ratio, run_work

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound here")


def row(work, place, seconds, turn=0):
    return BusyRow(work=work, place=place, seconds=seconds, runs=5, threads=2, turn=turn)


def made_up():
    times = {Place.ALONE: 2.0, Place.SPINNING: 4.0, Place.BUSY: 5.0, Place.ONE_CORE: 3.3, Place.ONE_THREAD: 3.0}
    rows = [row(Work.TSSA, place, seconds) for place, seconds in times.items()]
    return BusyResults(rows=[*rows, row(Work.TRAIN, Place.ALONE, 1.0), row(Work.TRAIN, Place.BUSY, 2.0)])


@pytest.mark.parametrize("work", [pytest.param(w, marks=[pytest.mark.slow] * (w is Work.GENERATE_BASE)) for w in Work])
def test_every_kind_of_work_runs(work):
    found = run_work(BusyJob(work=work, seconds=0.0, threads=1))
    assert len(found.seconds) == 3
    assert found.threads == 1


@pytest.mark.slow
def test_a_case_runs_in_its_own_process(monkeypatch):
    scale = BusyScale(work=(Work.TSSA,), seconds=0.1)
    monkeypatch.setattr(BusyScale, "cases", [(Work.TSSA, 0, Place.ONE_CORE), (Work.TSSA, 0, Place.ONE_THREAD)])
    measurement, results = BusyMeasurement(scale), BusyResults()
    assert measurement.check().passed
    assert len(list(measurement.measure(results, lambda _: None))) == measurement.steps == 2
    assert [found.threads for found in results.rows] == [1, 1]
    assert ratio(results, Work.TSSA, Place.ONE_CORE) > 0


def test_ratios_and_pages():
    results = made_up()
    assert ratio(results, Work.TSSA, Place.BUSY) == 2.5
    assert ratio(results, Work.TSSA, Place.SPINNING) == 0.5
    assert ratio(results, Work.TSSA, Place.ONE_CORE) == pytest.approx(1.1)
    assert ratio(results, Work.TRAIN, Place.ONE_CORE) is None
    (table,) = BusyMeasurement.tables(results)
    assert [cells[0] for cells in table.rows] == ["tssa", "train"]
    assert "busy: at most 2.50 (tssa); the goal is 2.5" in BusyMeasurement.findings(results)
    assert "## Beside busy processes" in BusyMeasurement.page(report("busy", results))
    assert len(BusyScale(turns=3).cases) == 60
    assert [place for work, turn, place in BusyScale(turns=2).cases[:10]] == [*Place, *Place]
    assert BusyScale.quick().work == (Work.GENERATE_TINY, Work.TSSA)


def test_a_ratio_is_the_median_over_turns():
    # The machine is three times as slow in the second turn, in both places.
    times = [(Place.ALONE, 1.0), (Place.BUSY, 2.0), (Place.ALONE, 3.0), (Place.BUSY, 6.6), (Place.BUSY, 90.0)]
    rows = [row(Work.TSSA, place, seconds, turn=index // 2) for index, (place, seconds) in enumerate(times)]
    results = BusyResults(rows=rows)
    assert ratio(results, Work.TSSA, Place.BUSY) == pytest.approx(2.1)  # the third turn has nothing to compare with
    (table,) = BusyMeasurement.tables(results)
    assert table.rows[0][2] == "2.10 (2.05-2.15)"


def test_places_are_left_as_they_were():
    before, variables = os.sched_getaffinity(0), dict(os.environ)
    for place in Place:
        with _conditions(place):
            if place is Place.ONE_CORE:
                assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getaffinity(0) == before
        assert dict(os.environ) == variables
