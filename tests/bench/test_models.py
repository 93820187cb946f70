"""`tost bench model` and `tost bench generate` at the smallest sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tost.bench import generate, model
from tost.bench.generate import Generate
from tost.bench.model import Models
from tost.errors import TostError
from tost.models import model_spec
from tost.models.registry import MODELS

MACHINE = {"gflops": {"float32": 100.0, "bfloat16": 400.0}, "gbytes": 10.0}


@pytest.fixture(autouse=True)
def small_gpt(monkeypatch):
    gpt = model_spec("gpt2_base")
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2, "vocab_size": 64}
    monkeypatch.setitem(MODELS._specs, "gpt2_tiny", replace(gpt, name="gpt2_tiny", defaults=gpt.defaults | sizes))


def test_models_in_every_runtime(monkeypatch):
    monkeypatch.setattr(model, "run_in_process", lambda function, job, **options: 7)
    monkeypatch.setattr(model, "measure_machine", lambda: MACHINE)
    paths = ("torch fp32", "OpenVINO bf16")
    bench = Models(models=("vit_mini", "gpt2_tiny"), size={32: 2}, context=(8,), path=paths, repeats=3)
    found = {"rows": []}
    assert len(list(bench.measure(found, lambda line: None))) == bench.steps == 3
    assert [(row["model"], row["path"]) for row in found["rows"]] == [
        (name, path) for name in ("vit_mini", "gpt2_tiny") for path in paths
    ]
    assert all(row["ratio"]["median"] == 1.0 and row["peak_bytes"] == 7 for row in found["rows"])
    assert all(row["gflops"] > 0 and row["of_copy"] > 0 for row in found["rows"])
    images, texts, shares = bench.tables(found)
    assert (images.headers[2:], texts.headers[2:]) == (("vit_mini",), ("gpt2_tiny",))
    assert [row[:3] for row in shares.rows][-1] == ("8 tokens", "gpt2_tiny", "OpenVINO bf16")


def test_what_does_not_fit_is_left_out(monkeypatch):
    def refuse(function, job, **options):
        raise TostError("out of memory")

    monkeypatch.setattr(model, "run_in_process", refuse)
    bench = Models(models=("vit_mini",), size={32: 1}, path=("torch fp32",), repeats=3)
    rows = bench._measure_case(bench._cases()[0], MACHINE)
    found = {"rows": rows, "machine": MACHINE}
    assert (rows[0]["note"], rows[0]["seconds"], rows[0]["gflops"]) == ("out of memory", None, None)
    assert bench.tables(found)[0].rows == [("1 x 32 px", "torch fp32", "does not fit")]
    assert len(bench.findings(found)) == 1


def test_best_runtimes_are_compared():
    def row(name, path, seconds):
        case = {"model": name, "path": path, "size": 224, "batch": 8, "limit": 0}
        return case | {"seconds": {"median": seconds}}

    rows = [row("a", "torch fp32", 3.0), row("a", "OpenVINO fp32", 1.0), row("b", "torch fp32", 1.5)]
    assert Models().findings({"rows": rows, "machine": MACHINE})[1] == (
        "8 x 224 px: b takes 1.50 times as long as a (1,500 ms by torch fp32, 1,000 ms by OpenVINO fp32)."
    )


def test_operations_of_a_text():
    what = model.Pass("gpt2_tiny", 100, 1, 400, "")
    network = what.build()
    with FlopCounterMode(display=False) as counter:
        network.features_with_state(torch.zeros(1, 100, dtype=torch.int64))
    width = network.options.embed_dim
    head, pairs = 2 * width * network.options.vocab_size, 2 * 4 * 100 * 100 * width  # torch counts no fused attention
    assert what.flops(network) == counter.get_total_flops() + head + pairs


def test_the_machine_is_measured():
    found = model.measure_machine()
    assert found["gflops"].keys() == {"float32", "bfloat16"}
    assert min(*found["gflops"].values(), found["gbytes"]) > 0


def test_a_model_equals_the_reference_operators():
    assert all(check.passed for check in model.check_model("tost_mini"))
    assert model.check_model("vit_mini") == []


@pytest.mark.slow
def test_every_path_equals_torch():
    checks = model.check_paths(model.installed())
    assert len(checks) == 2 * len(model.PATHS)
    assert all(check.passed for check in checks), checks


def test_generation_equals_a_pass_over_the_whole_text():
    checks = generate.check_generation()
    assert len(checks) == 6
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
