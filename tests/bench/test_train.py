"""The cost of the engine: a real, tiny measurement, and the refusal to compare different runs."""

import json

import pytest

from tost.bench import train as bench_train
from tost.bench.train import measure_overhead
from tost.errors import TostError
from tost.recipes import load_config

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


def test_overhead_is_measured_on_the_same_steps():
    lines = []
    report = measure_overhead(
        load_config("demo/digits", TINY), repeats=3, command="tost bench train", report=lines.append
    )
    assert len(lines) == 3
    assert report.ratio.count == 3
    assert report.bare.median > 0
    assert json.loads(json.dumps(report.to_json()))["theme"] == "train"


def test_no_number_is_given_when_the_sides_differ(monkeypatch):
    monkeypatch.setattr(bench_train, "learning_rate", lambda *_, **__: 1.0)
    with pytest.raises(TostError, match="do not take the same steps"):
        measure_overhead(load_config("demo/digits", TINY), repeats=3, command="", report=pytest.fail)
