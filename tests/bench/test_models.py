"""`tost bench model` and `tost bench generate` at the smallest sizes."""

from __future__ import annotations

import pytest

from tost.bench import generate, model
from tost.bench.generate import Generate
from tost.bench.model import Models


def test_models_are_compared_with_the_first(monkeypatch):
    monkeypatch.setattr(model, "run_in_process", lambda function, job, **options: function(job))
    bench = Models(models=("tost_mini", "vit_mini"), size={32: 2}, repeats=3)
    found = {"rows": []}
    assert len(list(bench.measure(found, lambda line: None))) == bench.steps == 2
    assert [(row["model"], row["case"]["training"]) for row in found["rows"]] == [
        (name, training) for training in (False, True) for name in ("tost_mini", "vit_mini")
    ]
    assert found["rows"][0]["ratio"]["median"] == 1.0
    inference, training = bench.tables(found)
    assert (inference.title.partition(":")[0], training.title.partition(":")[0]) == (
        "Inference",
        "Training step without optimizer",
    )
    assert [row[1] for row in training.rows] == ["tost_mini", "vit_mini"]


def test_a_model_equals_the_reference_operators():
    assert all(check.passed for check in model.check_model("tost_mini"))
    assert model.check_model("vit_mini") == []


def test_generation_equals_a_pass_over_the_whole_text():
    checks = generate.check_generation()
    assert len(checks) == 8
    assert all(check.passed for check in checks), checks


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(generate, "run_in_process", lambda function, job, **options: function(job))

    def make(**options):
        bench = Generate(quick=True, **options)
        bench._contexts, bench._baseline_contexts, bench._prompt, bench._train_tokens = (8, 24), (8,), 80, (24,)
        bench._sizes = {"depth": 1, "vocab_size": 1000}
        return bench

    return make


def test_parts_of_generation(tiny):
    bench = tiny(part=("prefill", "decode", "batch"), repeats=3)
    found = {"rows": []}
    assert len(list(bench.measure(found, lambda line: None))) == bench.steps == 3
    by_part = generate.grouped(found["rows"], lambda row: row["part"])
    decoded = {(row["contender"], row["tokens"]): row for row in by_part["decode"]}
    assert (generate.LIMIT, 0) in decoded
    assert decoded["tost_lm_base", 8]["state_bytes"] == decoded["tost_lm_base", 24]["state_bytes"]
    assert decoded["tost_lm_base", 24]["ratios"][generate.LIMIT]["median"] > 0
    assert {row["batch"] for row in by_part["batch"]} == {1, 8}
    assert next(table.title.partition(",")[0] for table in bench.tables(found)) == "A token"


def test_training_steps_beside_transformers(tiny):
    bench = tiny(part=("train",))
    found = {"rows": []}
    list(bench.measure(found, lambda line: None))
    assert [row["contender"] for row in found["rows"]] == list(generate.TRAINED)
    assert all(row["peak_bytes"] >= 0 for row in found["rows"])
