"""Whole models against each other: a real measurement of tiny ones, and the gate in front of it."""

from __future__ import annotations

import json

import pytest
import torch

from tost.bench.harness.environment import describe_environment
from tost.bench.harness.gate import Check, GateResult
from tost.bench.harness.peak import Pass, peak_bytes
from tost.bench.model import run as bench_models
from tost.bench.model.run import ModelCase, ModelReport, check_model, measure_models
from tost.bench.model.tables import model_markdown, model_tables
from tost.errors import TostError

GREEN = GateResult(checks=(Check(name="logits", error=0.0, bound=1e-5),))
RED = GateResult(checks=(Check(name="logits", error=1.0, bound=1e-5),))


@pytest.fixture(scope="module")
def rows():
    cases = [ModelCase(image_size=32, batch=2, training=training) for training in (False, True)]
    return [
        row
        for some in measure_models(["tost_mini", "vit_mini"], cases, repeats=3, memory=False, watch=lambda _: None)
        for row in some
    ]


def report(rows, gate=GREEN):
    return ModelReport(command="tost bench model", environment=describe_environment(), gate=gate, rows=rows)


def test_every_model_is_measured_in_every_case(rows):
    assert [(row.model, row.case.training) for row in rows] == [
        (model, training) for training in (False, True) for model in ("tost_mini", "vit_mini")
    ]
    assert all(row.seconds.count == 3 for row in rows)
    assert all(row.ratio.median == 1 for row in rows if row.model == "tost_mini")


def test_tables_show_each_row_once(rows):
    inference, training = model_tables(rows)
    assert [cells[1] for cells in inference.rows] == [cells[1] for cells in training.rows] == ["tost_mini", "vit_mini"]
    page = model_markdown(report(rows))
    assert all(f"{row.parameters:,}" in page for row in rows)
    assert json.loads(json.dumps(report(rows).to_json()))["rows"][0]["model"] == "tost_mini"


def test_a_red_gate_leaks_no_speed(rows):
    assert report(rows, RED).to_json()["rows"] == []
    with pytest.raises(ValueError, match="green gate"):
        model_markdown(report(rows, RED))


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


def test_peak_memory_grows_with_the_batch():
    small, large = (peak_bytes(Pass(model="tost_mini", batch=batch, image_size=32, training=True)) for batch in (1, 64))
    assert large > small + 10e6


def test_a_failing_process_is_reported_with_its_last_words():
    with pytest.raises(TostError, match=r"memory of tost_minx failed with code 1: .*tost_mini"):
        peak_bytes(Pass(model="tost_minx", batch=1, image_size=32, training=False))
