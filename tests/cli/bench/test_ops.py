from __future__ import annotations

import json
import signal

import pytest

from tost.bench.harness.gate import Check, GateResult
from tost.bench.ops import gate
from tost.bench.ops import tables as ops

TINY = ["bench", "ops", "--tokens", "16,32", "--width", "16", "--heads", "2", "--repeats", "3"]
TINY += ["--threads", "1", "--no-compile", "--quick"]


@pytest.fixture
def green_gate(monkeypatch):
    """Skip the parity checks."""
    result = GateResult(checks=(Check(name="nothing", error=0.0, bound=1.0),))
    monkeypatch.setattr(gate, "run_gate", lambda ops, **_: result)


def test_bench_ops_end_to_end(run, monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "SHAPES", gate.SHAPES[:2])  # its own tests run it in full
    out = tmp_path / "results"
    outcome = run(*TINY, "--json", "--out", str(out))
    assert outcome.code == 0, outcome.err
    content = json.loads(outcome.out.splitlines()[-1])
    assert content["complete"]
    assert content["gate"]["passed"]
    assert content["gate"]["checks"] > 200
    contenders = {"limit", "tost", "tost-torch", "paper eager", "sdpa"}
    seen = {(row["op"], row["mode"], row["tokens"], row["contender"]) for row in content["rows"]}
    for mode in ("fwd", "fwd+bwd"):
        for tokens in (16, 32):
            assert {name for *key, name in seen if key == ["tssa", mode, tokens]} == {*contenders, "xca"}
            assert {name for *key, name in seen if key == ["causal_tssa", mode, tokens]} == contenders
    for row in content["rows"]:
        assert row["repeats"] == 3
        assert row["seconds_lower_quartile"] <= row["seconds_median"] <= row["seconds_upper_quartile"]
        assert (row["kept_bytes"] is None) == (row["mode"] == "fwd")
        assert row["contender"] != "limit" or row["ratio_to_limit_median"] == 1
    stem = f"ops-quick_{content['environment']['cpu'].lower().replace(' ', '-')}-1t"
    names = sorted(path.name for path in out.iterdir())
    assert [name.rpartition(".")[2] for name in names] == ["json", "md", "svg"]
    assert all(name.startswith(stem[:10]) for name in names)
    assert json.loads((out / names[0]).read_text()) == content
    assert str(tmp_path) not in (out / names[0]).read_text()  # no folder of this machine in a published file


def test_bench_shows_no_speed_behind_a_red_gate(run, monkeypatch, tmp_path):
    red = GateResult(checks=(Check(name="tssa native 1x1x1x1 float32 dw", error=0.5, bound=1e-5),))
    monkeypatch.setattr(gate, "run_gate", lambda ops, **_: red)
    outcome = run(*TINY, "--json", "--out", str(tmp_path))
    assert outcome.code == 1
    assert "tssa native 1x1x1x1 float32 dw: relative rms 0.5 exceeds 1e-05" in outcome.out
    assert "limit" not in outcome.out.rpartition("\n{")[0]
    content = json.loads(outcome.out.splitlines()[-1])
    assert (content["rows"], content["gate"]["passed"]) == ([], False)
    assert list(tmp_path.iterdir()) == []


def press_ctrl_c() -> None:
    raise KeyboardInterrupt  # not the signal, which a process in the background ignores


def interrupt_at(monkeypatch, count: int, interrupt=press_ctrl_c) -> None:
    """Interrupt while case number `count` is measured."""
    real, calls = ops.measure_case, iter(range(1, count + 1))

    def measure_case(*args, **kwargs):
        if next(calls) == count:
            interrupt()
        return real(*args, **kwargs)

    monkeypatch.setattr(ops, "measure_case", measure_case)


def test_interrupted_bench_keeps_the_finished_cases(run, monkeypatch, tmp_path, green_gate):
    interrupt_at(monkeypatch, 3)
    outcome = run(*TINY, "--json", "--out", str(tmp_path))
    assert outcome.code == 130
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".partial.json")
    content = json.loads(path.read_text())
    assert not content["complete"]
    assert {(row["mode"], row["tokens"]) for row in content["rows"]} == {("fwd", 16), ("fwd+bwd", 16)}
    assert f"interrupted: 2 of 8 cases are kept in {path}" in outcome.err
    assert json.loads(outcome.out.splitlines()[-1]) == content


def test_interrupted_bench_without_out_says_that_no_file_was_written(run, monkeypatch, green_gate):
    interrupt_at(monkeypatch, 2)
    outcome = run(*TINY)
    assert outcome.code == 130
    assert "1 of 8 cases are kept above, but in no file" in outcome.err


def test_a_terminated_bench_keeps_the_finished_cases(run, monkeypatch, tmp_path, green_gate):
    before = signal.getsignal(signal.SIGTERM)
    interrupt_at(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    outcome = run(*TINY, "--out", str(tmp_path))
    assert (outcome.code, "2 of 8 cases are kept" in outcome.err) == (130, True)
    assert [path.name.endswith(".partial.json") for path in tmp_path.iterdir()] == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_interrupt_during_the_gate_keeps_nothing(run, monkeypatch, tmp_path):
    def interrupt(ops, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "run_gate", interrupt)
    outcome = run(*TINY, "--out", str(tmp_path))
    assert outcome.code == 130
    assert "nothing was kept" in outcome.err
    assert list(tmp_path.iterdir()) == []
