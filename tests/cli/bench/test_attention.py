"""`tost bench attention`: from the gate to the files. Points are measured in this process, to save starting others."""

from __future__ import annotations

import json

import pytest

from tost.bench.attention import run as attention
from tost.bench.attention.cases import CONTENDERS, AttentionScale, Figure, Shape
from tost.bench.attention.run import Roofline, measure_point
from tost.bench.harness.gate import Check, GateResult
from tost.bench.ops import gate
from tost.errors import TostError

QUICK = ("bench", "attention", "--quick", "--threads", "1", "--device", "cpu")


@pytest.fixture
def small(monkeypatch):
    """No operators to check, tiny sizes, one process."""
    green = GateResult(checks=(Check(name="nothing", error=0.0, bound=1.0),))
    monkeypatch.setattr(gate, "run_gate", lambda ops: green)
    shapes = {
        Figure.ALONE: Shape(tokens=(16,), widths=(8,), heads=2, depth=1, passes=(False, True)),
        Figure.TOKENS: Shape(tokens=(16, 32), widths=(8,), heads=2, depth=2),
    }
    tiny = AttentionScale(shapes=shapes, pass_seconds=0.001, most_repeats=3, rounds=1)
    monkeypatch.setattr(AttentionScale, "quick", classmethod(lambda cls: tiny))
    roof = Roofline(flops_per_second=1e11, bytes_per_second=1e10)
    monkeypatch.setattr(attention, "roofline_in_process", lambda device: roof)
    monkeypatch.setattr(attention, "keep_freed_memory", lambda: None)
    replace_runner(monkeypatch, lambda job, *, timeout, limit_bytes: measure_point(job))


def replace_runner(monkeypatch, runner):
    monkeypatch.setitem(attention.measure_attention.__kwdefaults__, "in_process", runner)


def test_from_the_gate_to_the_files(run, small, tmp_path):
    done = run(*QUICK, "--out", str(tmp_path), "--json")
    assert done.code == 0, done.err
    content = json.loads(done.out.splitlines()[-1])
    assert content["complete"]
    assert content["theme"] == "attention-quick"
    assert [row["contender"] for row in content["rows"][:5]] == list(CONTENDERS)
    assert len(content["rows"]) == 20
    assert len(content["pairs"]) == 2
    assert all(row["seconds"]["median"] > 0 for row in content["rows"])
    assert "in turns" in done.out
    assert "1 attention layer, d=8, K=2, forward, ms" in done.out
    assert "100 GFLOP/s in a matrix product" in done.err
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rpartition(".")[2] for name in names] == ["json", "md", "svg", "svg"]
    stored = next(tmp_path.glob("*.json")).read_text()
    assert json.loads(stored) == content
    assert str(tmp_path) not in stored


def test_one_figure(run, small):
    done = run(*QUICK, "--figure", "tokens", "--json")
    content = json.loads(done.out.splitlines()[-1])
    assert {row["figure"] for row in content["rows"]} == {"tokens"}
    assert content["pairs"] == []


def test_what_fails_or_takes_too_long_is_shown(run, small, monkeypatch):
    def fails(job, *, timeout, limit_bytes):
        raise TostError(f"{job.point.label}: out of memory")

    replace_runner(monkeypatch, fails)
    done = run(*QUICK, "--figure", "tokens")
    assert done.code == 0
    assert "out of memory" in done.out
    assert "left out: out of memory (predicted" in done.err
    done = run(*QUICK, "--figure", "tokens", "--limit-seconds", "0")
    assert "predicted 0 s" in done.out
    assert "predicted 0.0 GB" in run(*QUICK, "--figure", "tokens", "--limit-gb", "0.0000001").out
    assert "no time left" in run(*QUICK, "--figure", "tokens", "--minutes", "0").out


def test_a_red_gate_stops_it(run, small, monkeypatch, tmp_path):
    red = GateResult(checks=(Check(name="tssa native dw", error=0.5, bound=1e-5),))
    monkeypatch.setattr(gate, "run_gate", lambda ops: red)
    done = run(*QUICK, "--out", str(tmp_path))
    assert done.code == 1
    assert "tssa native dw: relative rms 0.5" in done.out
    assert "no speed was measured" in done.err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_keeps_what_is_finished(run, small, monkeypatch, tmp_path):
    def stops(job, *, timeout, limit_bytes):
        if job.point.figure is Figure.TOKENS:
            assert len(list(tmp_path.glob("*.partial.json"))) == 1, "it is on disk before the end"
            raise KeyboardInterrupt
        return measure_point(job)

    replace_runner(monkeypatch, stops)
    done = run(*QUICK, "--out", str(tmp_path))
    assert done.code == 130
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".partial.json")
    assert len(json.loads(path.read_text())["rows"]) == 10


@pytest.mark.parametrize("arguments", [["--figure", "speed"], ["--device", "tpu"], ["--limit-gb", "-1"]])
def test_mistakes_exit_2(run, arguments):
    assert run("bench", "attention", *arguments).code == 2
