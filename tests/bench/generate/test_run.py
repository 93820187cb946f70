"""Language models at work: a real measurement of tiny ones, the tables made of it, and the gate in front of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.bench.reports import RED, report
from tost import create_model
from tost.bench.generate import run as bench
from tost.bench.generate.cases import BENCHMARK, GenerateScale, Part
from tost.bench.generate.gpt2 import HuggingFaceGPT2
from tost.bench.generate.quality import loss_of_text, measure_quality
from tost.bench.generate.run import (
    TRAINED,
    GenerateResults,
    TrainStep,
    check_generation,
    measure_generation,
    step_in_process,
    take_step,
)
from tost.bench.generate.tables import GenerateMeasurement, generate_page, generate_tables
from tost.errors import ConfigError, TostError
from tost.train.checkpoint.model import save_model

SCALE = replace(
    GenerateScale.quick(),
    contexts=(8, 16),
    baseline_contexts=(16,),
    prompt=16,
    train_tokens=(32,),
    depth=1,
    vocab_size=1024,
)


@pytest.fixture(scope="module")
def rows():
    """Everything but training, which takes a process each; that part gets times from this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "step_in_process", take_step)
        return [row for some in measure_generation(SCALE, watch=lambda _: None) for row in some]


def generate_report(rows, **changes):
    about = GenerateMeasurement(SCALE).about()
    return report("generate", GenerateResults(rows=rows), about=about, **changes)


def test_every_part_is_measured(rows):
    assert [row.part for row in rows] == sorted((row.part for row in rows), key=list(Part).index)
    decoded = {(row.contender, row.tokens) for row in rows if row.part is Part.DECODE}
    limits = (bench.TORCH_LIMIT, bench.OUR_LIMIT)
    assert {("tost_lm_base", 8), ("tost_lm_base", 16), *((name, 0) for name in limits)} <= decoded
    assert ("gpt2_base", 16) in decoded
    assert ("gpt2_base", 8) not in decoded
    assert {(row.weights, row.batch) for row in rows if row.part is Part.BATCH} == {
        (weights, batch) for weights in ("fp32", "bf16", "int8") for batch in (1, 8)
    }
    assert all(row.median > 0 for row in rows)
    own = [row for row in rows if row.part is Part.DECODE and row.contender == "tost_lm_base"]
    assert all({*limits, "tost_lm_base at 8"} <= row.ratios.keys() for row in own)
    assert own[0].ratios["tost_lm_base at 8"].median == 1
    # H (2D + 1) numbers of 4 bytes, and the position; in blocks of g, D (g + 1) / 2 in place of one D.
    assert {row.state_bytes for row in own} == {4 * 12 * (2 * 64 + 1) + 8}
    (blocks,) = (row for row in rows if row.contender == bench.BLOCKS)
    assert blocks.state_bytes == 4 * 12 * (64 + 64 * 9 // 2 + 1) + 8
    assert "tost_lm_base at 16" in blocks.ratios


def test_tables_show_each_row_once(rows):
    tables = generate_tables(GenerateResults(rows=rows))
    assert sum(len(table.rows) for table in tables) == len(rows)
    assert all(len(cells) == len(table.headers) for table in tables for cells in table.rows)
    page = generate_page(generate_report(rows))
    assert all(row.contender in page for row in rows)
    assert "/ tost_lm_base, 8" in page
    stored = json.loads(json.dumps(generate_report(rows).to_json(), allow_nan=False))
    assert len(stored["rows"]) == len(rows)
    assert stored["scale"]["prompt"] == 16
    assert not {"part", "source", "text"} & set(stored["scale"]), "no path of this machine"


def test_fewer_bits_cost_a_little_loss(tmp_path):
    torch.manual_seed(0)
    model = create_model("tost_lm_base", embed_dim=32, num_heads=2, depth=1, vocab_size=256, max_length=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    save_model(model, tmp_path / "model")
    (tmp_path / "text").write_bytes(bytes(range(256)) * 2)
    rows = measure_quality(tmp_path / "model", tmp_path / "text", tokens=100)
    exact, half, quarter = (row.loss for row in rows)
    ids = torch.tensor([list(range(101))])
    assert exact == pytest.approx(loss_of_text(model, ids))
    pieces = [ids[:, i : i + 17] for i in range(0, 100, 16)]
    by_hand = sum(model.loss(p[:, :-1], p[:, 1:], reduction="sum").item() for p in pieces) / 100
    assert exact == pytest.approx(by_hand)
    assert 0 < abs(half - exact) < 0.02
    assert 0 < abs(quarter - exact) < 0.1
    (table,) = generate_tables(GenerateResults(rows=rows))
    assert [cells[0] for cells in table.rows] == ["fp32", "bf16", "int8"]
    (tmp_path / "text").write_bytes(b"a")
    with pytest.raises(ConfigError, match="has 1 tokens; a loss needs at least 2"):
        measure_quality(tmp_path / "model", tmp_path / "text", tokens=100)


def test_a_demonstration_or_a_part_has_files_of_its_own():
    assert BENCHMARK.theme(GenerateScale.quick(), quick=True) == "generate-quick"
    assert BENCHMARK.theme(GenerateScale(part=(Part.TRAIN,))) == "generate-selection"
    assert BENCHMARK.theme(GenerateScale(repeats=9)) == "generate"


def test_a_red_gate_leaks_no_speed(rows):
    assert generate_report(rows, gate=RED).to_json()["rows"] == []
    with pytest.raises(ValueError, match="green gate"):
        generate_page(generate_report(rows, gate=RED))


def test_gate_compares_steps_with_the_reference(monkeypatch):
    checks = check_generation()
    assert all(check.passed for check in checks)
    assert {check.name for check in checks} >= {"tost_lm_base step", "tost_lm_base_plus step", "gpt2_base step"}
    original = bench.make_step
    monkeypatch.setattr(bench, "make_step", lambda model: lambda tokens, state: original(model)(tokens * 0, state))
    assert [check.name for check in check_generation() if not check.passed] == [
        f"{name} step" for name in ("tost_lm_base", bench.BLOCKS, "tost_lm_base_plus", "gpt2_base")
    ]


def test_limits_read_every_matrix_once():
    model = create_model("tost_lm_base", embed_dim=16, num_heads=2, depth=2, vocab_size=11, max_length=8)
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(matrices) == 8
    limits = bench._limits(model)
    assert set(limits) == {bench.TORCH_LIMIT, bench.OUR_LIMIT}
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.F, "linear", lambda x, w: called.append(w.numel()))
        limits[bench.TORCH_LIMIT]()
    assert sum(called) == sum(m.numel() for m in matrices) + model.tokens.weight.numel()
    limits[bench.OUR_LIMIT]()


def test_gpt2_reads_prompts_and_steps_as_it_does_whole():
    torch.manual_seed(0)
    gpt2 = HuggingFaceGPT2(max_length=16, depth=1, vocab_size=64).eval()
    ids = torch.randint(64, (1, 10))
    cache = gpt2.prefill(ids[:, :-1])
    logits, cache = gpt2.step(ids[:, -1], cache)
    with torch.no_grad():
        assert torch.allclose(logits[:, -1], gpt2.model(ids).logits[:, -1], atol=1e-4)
        assert torch.allclose(gpt2.loss(ids), gpt2.chunked_loss(ids), atol=1e-5)


@pytest.mark.slow
def test_training_steps_differ_in_memory_for_their_logits():
    sizes = {"tokens": 64, "depth": 1, "vocab_size": 50_000}
    whole, chunked = (step_in_process(TrainStep(contender=name, **sizes)) for name in TRAINED[1:])
    assert whole.loss == pytest.approx(chunked.loss, rel=1e-5)
    assert whole.peak_bytes > 0
    assert chunked.peak_bytes > 0
    assert whole.seconds > 0


def test_a_failing_process_is_reported_with_its_last_words():
    with pytest.raises(TostError, match=r"a training step of tost_lm_base: failed with code 1: .*depth"):
        step_in_process(TrainStep(contender="tost_lm_base", tokens=8, depth=0))
