"""Whole models against each other: a real measurement of tiny ones, and the gate in front of it."""

from __future__ import annotations

import json

import pytest
import torch

from tests.bench.reports import RED, report
from tost.bench.model import run as bench_models
from tost.bench.model.cases import BENCHMARK, ModelCase, ModelScale
from tost.bench.model.run import ModelResults, Pass, check_model, measure_models, peak_bytes
from tost.bench.model.tables import model_page, model_tables
from tost.errors import TostError

SCALE = ModelScale(models=("tost_mini", "vit_mini"), size={32: 2}, repeats=3, memory=False)


@pytest.fixture(scope="module")
def results():
    return ModelResults(rows=[row for rows in measure_models(SCALE, watch=lambda _: None) for row in rows])


def test_every_model_is_measured_in_every_case(results):
    assert [(row.model, row.case.training) for row in results.rows] == [
        (model, training) for training in (False, True) for model in ("tost_mini", "vit_mini")
    ]
    assert all(row.seconds.count == 3 for row in results.rows)
    assert all(row.ratio.median == 1 for row in results.rows if row.model == "tost_mini")


def test_tables_show_each_row_once(results):
    inference, training = model_tables(results)
    assert [cells[1] for cells in inference.rows] == [cells[1] for cells in training.rows] == ["tost_mini", "vit_mini"]
    page = model_page(report("model", results))
    assert all(f"{row.parameters:,}" in page for row in results.rows)
    assert json.loads(json.dumps(report("model", results).to_json()))["rows"][0]["model"] == "tost_mini"


def test_a_red_gate_leaks_no_speed(results):
    assert report("model", results, gate=RED).to_json()["rows"] == []
    with pytest.raises(ValueError, match="green gate"):
        model_page(report("model", results, gate=RED))


def test_gate_compares_the_model_with_the_reference(monkeypatch):
    checks = check_model("tost_mini")
    assert all(check.passed for check in checks)
    assert {check.name for check in checks} >= {"tost_mini logits"}
    run = bench_models.run_pass

    def wrong(model, images, *, training):
        return run(model, images if images.dtype == torch.float64 else images**1.01, training=training)

    monkeypatch.setattr(bench_models, "run_pass", wrong)
    assert not all(check.passed for check in check_model("tost_mini"))


def test_models_without_a_choice_of_operators_have_nothing_to_compare():
    assert check_model("vit_mini") == []


@pytest.mark.slow
def test_peak_memory_grows_with_the_batch():
    cases = [ModelCase(image_size=32, batch=batch, training=True) for batch in (1, 64)]
    small, large = (peak_bytes(Pass(model="tost_mini", case=case)) for case in cases)
    assert large > small + 10e6


def test_a_failing_process_is_reported_with_its_last_words():
    with pytest.raises(TostError, match=r"memory of tost_minx: failed with code 1: .*tost_mini"):
        peak_bytes(Pass(model="tost_minx", case=SCALE.cases[0]))


def test_sizes_are_read_from_the_command_line():
    assert [case.label for case in ModelScale(size={224: 8}).cases] == ["8 x 224 px, inference", "8 x 224 px, training"]
    assert BENCHMARK.theme(ModelScale(repeats=5)) == "model"
    assert BENCHMARK.theme(SCALE) == "model-selection"
