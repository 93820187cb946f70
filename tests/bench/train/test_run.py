"""The cost of the engine: a real, tiny measurement, and the refusal to compare different runs."""

import json

import pytest

from tests.bench.reports import report
from tost.bench.train import run as bench_train
from tost.bench.train.cases import TrainScale
from tost.bench.train.run import TrainMeasurement, TrainResults
from tost.errors import TostError

TINY = [
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "train.steps=4",
    "train.batch_size=8",
    "schedule.warmup_steps=1",
    "checkpoint.best_metric=null",
    "evaluate.every=0",
    "evaluate.batches=1",
    "log.every=2",
]


@pytest.fixture
def measurement():
    return TrainMeasurement(TrainScale(config="demo/digits", overrides=tuple(TINY), repeats=3))


def test_overhead_is_measured_on_the_same_steps(measurement):
    assert measurement.check().passed
    results = TrainResults()
    assert len(list(measurement.measure(results, lambda _: None))) == measurement.steps == 3
    assert results.steps == 4
    assert results.ratio.count == 3
    assert results.bare.median > 0
    content = json.loads(json.dumps(report("train", results).to_json()))
    assert content["theme"] == "train"
    assert content["ratio"]["count"] == 3
    (table,) = measurement.tables(results)
    assert [cells[0] for cells in table.rows] == ["bare loop", "engine"]
    assert "engine / bare loop: " in measurement.page(report("train", results))


def test_no_number_is_given_when_the_sides_differ(monkeypatch, measurement):
    monkeypatch.setattr(bench_train, "learning_rate", lambda *_, **__: 1.0)
    assert not measurement.check().passed
    results = TrainResults()
    with pytest.raises(TostError, match="do not take the same steps"):
        list(measurement.measure(results, lambda _: None))
    assert results == TrainResults()
