"""Steps by length: a real, short measurement, what is left out of it, and its page."""

from dataclasses import replace

import pytest
import torch

from tests.bench.reports import report
from tost.bench.length import run as length
from tost.bench.length.cases import LengthScale, Way
from tost.bench.length.run import LengthMeasurement, LengthResults, LengthRow, Point, PointUsage

SMALL = LengthScale(tokens=(64, 256), chunk=32, width=16, heads=2, checked_tokens=512)
SIZES = {"chunk": 32, "width": 16, "heads": 2, "depth": 2, "vocab_size": 256}


def test_every_way_is_measured_at_every_length(monkeypatch):
    monkeypatch.setattr(length, "run_in_process", lambda function, point, **options: function(point))
    measurement, results = LengthMeasurement(SMALL), LengthResults()
    assert measurement.check().passed
    assert len(list(measurement.measure(results, lambda _: None))) == measurement.steps == 6
    assert all(row.usage.seconds > 0 and not row.note for row in results.rows)
    text = LengthMeasurement.page(report("length", results))
    assert "## Growth of memory in a step, MB" in text
    assert "256 tokens against 64" in text


def test_a_point_is_measured_in_a_process_of_its_own():
    point = Point(way=Way.PIECES, tokens=256, **SIZES)
    usage = length.run_in_process(length.measure_point, point, label=point.label)
    assert usage.cpu_seconds > 0
    assert usage.peak_bytes > 4 * 256 * SIZES["width"]  # at least the gradient of the embedding


@pytest.mark.parametrize("dtype", length.BOUNDS)
def test_gradients_in_pieces_are_those_of_the_whole(dtype):
    assert length.difference(dtype, 2048) < length.BOUNDS[dtype]


def test_a_gate_sees_gradients_that_are_cut_off(monkeypatch):
    whole = length.LanguageToST.loss
    monkeypatch.setattr(
        length.LanguageToST,
        "loss",
        lambda self, *args, chunk: whole(self, *args, chunk=chunk, truncate=chunk and 1),
    )
    assert length.difference(torch.float32, 512) > 1e-3


def test_whole_sequences_that_take_too_long_are_left_out_and_pieces_are_not(monkeypatch):
    usage = PointUsage(seconds=10.0, cpu_seconds=10.0, peak_bytes=10**9)
    monkeypatch.setattr(length, "run_in_process", lambda *args, **options: usage)
    results = LengthResults()
    measurement = LengthMeasurement(replace(SMALL, tokens=(64, 6400), limit_seconds=100, limit_bytes=10**10))
    measurement.differences = {}
    list(measurement.measure(results, lambda _: None))
    assert [row.usage for row in results.rows if row.way is Way.PIECES] == [usage, usage]
    notes = {row.way: row.note for row in results.rows if row.tokens == 6400}
    assert notes[Way.PIECES] == ""
    assert notes[Way.WHOLE] == "left out, predicted 1,000 s and 100.0 GB"
    assert notes[Way.GPT2].startswith("left out, predicted")
    assert "gpt2, 6,400 tokens: left out" in LengthMeasurement.page(report("length", results))


def test_softmax_attention_is_expected_to_grow_with_the_square():
    def growth(way):
        short, long = (Point(way=way, tokens=tokens, **SIZES).flops for tokens in (10**5, 10**6))
        return long / short

    assert growth(Way.PIECES) == 10
    assert growth(Way.GPT2) > 99


def test_the_goals_stand_beside_the_ratios_of_the_last_two_lengths():
    def row(tokens, seconds, peak_bytes):
        usage = PointUsage(seconds=seconds, cpu_seconds=2 * seconds, peak_bytes=peak_bytes)
        return LengthRow(way=Way.PIECES, tokens=tokens, usage=usage)

    found = LengthMeasurement.findings(LengthResults(rows=[row(10, 1.0, 100), row(100, 10.5, 120)]))
    assert found[0].startswith("in pieces, 100 tokens against 10: 1.20 of the memory")
    assert "1.05 of the time per token, 1.05 of the processor time" in found[1]
