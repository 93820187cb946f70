from __future__ import annotations

import json
import signal

import pytest

from tost.bench import ops
from tost.bench.harness import Check, Gate
from tost.bench.ops import Ops
from tost.cli import _bench as bench_command

TINY = ["bench", "ops", "--tokens", "16,32", "--width", "16", "--heads", "2", "--repeats", "3"]
TINY += ["--threads", "1", "--no-compile", "--quick"]


@pytest.fixture
def green_gate(monkeypatch):
    """Skip the parity checks."""
    monkeypatch.setattr(Ops, "check", lambda self: Gate([Check("nothing", 0.0, 1.0)]))


def test_bench_ops_end_to_end(run, monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "_CHECKED", ops._CHECKED[:2])  # its own tests run it in full
    outcome = run(*TINY, "--json", "--out", str(tmp_path / "results"))
    assert outcome.code == 0, outcome.err
    content = json.loads(outcome.out.splitlines()[-1])
    assert content["complete"]
    assert content["gate"]["passed"]
    assert content["gate"]["checks"] > 200
    contenders = {"limit", "tost", "tost-torch", "paper eager", "sdpa"}
    for mode in ("fwd", "fwd+bwd"):
        for tokens in (16, 32):
            rows = [row for row in content["rows"] if (row["mode"], row["tokens"]) == (mode, tokens)]
            assert {row["contender"] for row in rows if row["op"] == "tssa"} == {*contenders, "xca"}
            assert {row["contender"] for row in rows if row["op"] == "causal_tssa"} == contenders
    for row in content["rows"]:
        assert row["repeats"] == 3
        assert row["seconds_lower_quartile"] <= row["seconds_median"] <= row["seconds_upper_quartile"]
        assert ("kept_bytes" in row) == (row["mode"] == "fwd+bwd")
        assert row["contender"] != "limit" or row["ratio_to_limit_median"] == 1
    files = sorted((tmp_path / "results").iterdir())
    assert [file.suffix for file in files] == [".json", ".md", ".svg"]
    assert all(file.name.startswith("ops-quick_") for file in files)
    assert json.loads(files[0].read_text()) == content
    assert str(tmp_path) not in files[0].read_text()  # no folder of this machine in a published file


def test_bench_shows_no_speed_behind_a_red_gate(run, monkeypatch, tmp_path):
    red = Gate([Check("tssa native 1x1x1x1 float32 dw", 0.5, 1e-5)])
    monkeypatch.setattr(Ops, "check", lambda self: red)
    outcome = run(*TINY, "--json", "--out", str(tmp_path))
    assert outcome.code == 1
    assert "tssa native 1x1x1x1 float32 dw: relative rms 0.5 exceeds 1e-05" in outcome.out
    content = json.loads(outcome.out.splitlines()[-1])
    assert (content["rows"], content["gate"]["passed"]) == ([], False)
    assert list(tmp_path.iterdir()) == []


def press_ctrl_c() -> None:
    raise KeyboardInterrupt  # not the signal, which a process in the background ignores


def interrupt_at(monkeypatch, count: int, interrupt=press_ctrl_c) -> None:
    """Interrupt while case number `count` is measured."""
    real, calls = Ops._measure_case, iter(range(1, count + 1))

    def measure_case(self, case):
        if next(calls) == count:
            interrupt()
        return real(self, case)

    monkeypatch.setattr(Ops, "_measure_case", measure_case)


@pytest.mark.parametrize("interrupt", [press_ctrl_c, lambda: signal.raise_signal(signal.SIGTERM)])
def test_interrupted_bench_keeps_the_finished_cases(run, monkeypatch, tmp_path, green_gate, interrupt):
    before = signal.getsignal(signal.SIGTERM)
    interrupt_at(monkeypatch, 3, interrupt)
    outcome = run(*TINY, "--json", "--out", str(tmp_path))
    assert outcome.code == 130
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".partial.json")
    content = json.loads(path.read_text())
    assert not content["complete"]
    assert {(row["mode"], row["tokens"]) for row in content["rows"]} == {("fwd", 16), ("fwd+bwd", 16)}
    assert f"interrupted: 2 of 12 cases are kept in {path}" in outcome.err
    assert json.loads(outcome.out.splitlines()[-1]) == content
    assert signal.getsignal(signal.SIGTERM) is before


def test_interrupted_bench_without_out_and_during_the_gate(run, monkeypatch, tmp_path, green_gate):
    interrupt_at(monkeypatch, 2)
    outcome = run(*TINY)
    assert (outcome.code, "1 of 12 cases are kept above, but in no file" in outcome.err) == (130, True)
    monkeypatch.setattr(Ops, "check", lambda self: press_ctrl_c())
    outcome = run(*TINY, "--out", str(tmp_path))
    assert (outcome.code, "nothing was kept" in outcome.err) == (130, True)
    assert list(tmp_path.iterdir()) == []


def test_every_operator_can_be_measured():
    assert {*bench_command.Op} == {*ops.OPS}
