"""`tost bench generate`: from the gate to the files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tost.bench.generate import run as generate
from tost.bench.generate import tables as generate_tables
from tost.bench.generate.cases import GenerateScale
from tost.bench.harness.gate import Check, GateResult
from tost.bench.ops import gate


@pytest.fixture
def small(monkeypatch):
    """No operators to check, tiny models."""
    monkeypatch.setattr(gate, "run_gate", lambda ops: GateResult(checks=()))
    tiny = replace(GenerateScale.quick(), contexts=(8, 16), baseline_contexts=(), prompt=16, depth=1, repeats=3)
    monkeypatch.setattr(GenerateScale, "quick", classmethod(lambda cls: tiny))
    monkeypatch.setattr(generate, "is_installed", lambda: False)


def test_parts_are_measured_shown_and_written(run, small, tmp_path):
    arguments = ["--part", "batch", "--part", "decode", "--quick", "--threads", "1", "--out", str(tmp_path), "--json"]
    done = run("bench", "generate", *arguments)
    assert done.code == 0, done.err
    shown = json.loads(done.out.splitlines()[-1])
    assert {row["part"] for row in shown["rows"]} == {"decode", "batch"}
    assert shown["gate"]["passed"]
    (stored,) = tmp_path.glob("generate-quick_*.json")
    assert json.loads(stored.read_text()) == shown
    (page,) = tmp_path.glob("generate-quick_*.md")
    assert "A token, by context" in page.read_text()
    assert "decode: contexts 8, 16, batch 1" in done.err


def test_a_red_gate_stops_it(run, small, monkeypatch, tmp_path):
    wrong = Check(name="tost_lm_base step", error=1.0, bound=1e-4)
    monkeypatch.setattr(generate_tables, "check_generation", lambda: [wrong])
    done = run("bench", "generate", "--quick", "--out", str(tmp_path))
    assert done.code == 1
    assert "tost_lm_base step: relative rms 1" in done.out
    assert "no speed was measured" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--part", "quality"], ["--source", "run"], ["--text", "file"], ["--part", "speed"]]
)
def test_mistakes_exit_2(run, arguments):
    done = run("bench", "generate", "--quick", *arguments)
    assert done.code == 2
    assert "--source RUN --text FILE" in done.err or "'speed' is not one of" in done.err
