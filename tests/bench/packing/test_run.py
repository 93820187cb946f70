"""Packed against padded: a real, short measurement, and its page."""

import pytest

from tests.bench.reports import report
from tost.bench.packing.cases import PackingScale
from tost.bench.packing.run import PackingMeasurement, PackingResults

TEXTS = ["good film", "bad", "a very good film with a rather long review of it", "no"]


@pytest.fixture
def reviews(tmp_path):
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number, text in enumerate(TEXTS):
                (folder / f"{number}.txt").write_text(f"{text} {label}")
    return str(tmp_path)


def test_both_parts_are_measured(reviews):
    small = {"sequences": 3, "length": 5, "repeats": 3, "steps": 3, "batch_size": 4, "max_length": 32}
    scale = PackingScale(data=reviews, config="lra/text_cpu", **small)
    measurement, results = PackingMeasurement(scale), PackingResults()
    assert measurement.check().passed
    assert len(list(measurement.measure(results, lambda _: None))) == measurement.steps == 5
    assert results.training.steps == 3
    assert 0 < results.training.padding < 1
    assert results.training.difference < 1e-5
    assert reviews not in str(measurement.about())
    text = PackingMeasurement.page(report("packing", results))
    assert "## Operators on packed sequences" in text
    assert "## Training on reviews" in text


def test_without_reviews_there_is_no_training():
    scale = PackingScale.quick()
    assert PackingMeasurement(scale).steps == 4
    assert len(PackingMeasurement.tables(PackingResults())) == 1
