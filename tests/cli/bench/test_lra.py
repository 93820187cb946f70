"""`tost bench lra` as a user runs it."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import run  # noqa: F401  (a fixture)
from tost.bench.harness.gate import Check, GateResult
from tost.bench.ops import gate

SMALL = ("bench", "lra", "--lengths", "32,16", "--mixers", "tssa,linear", "--no-memory", "--no-pathx", "--repeats", "3")


@pytest.fixture
def green_gate(monkeypatch):
    """Skip the parity checks of the operator, which have tests of their own."""
    result = GateResult(checks=(Check(name="nothing", error=0.0, bound=1.0),))
    monkeypatch.setattr(gate, "run_gate", lambda ops: result)


@pytest.mark.slow
def test_bench_lra_end_to_end(run, green_gate, tmp_path):  # noqa: F811
    outcome = run(*SMALL, "--quick", "--json", "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    content = json.loads(outcome.out.splitlines()[-1])
    assert content["complete"]
    assert content["scale"]["lengths"] == [16, 32]
    seen = {(row["case"]["work"], row["case"]["tokens"], row["mixer"]) for row in content["rows"]}
    works = ("step", "mixer fwd", "mixer fwd+bwd")
    assert seen == {(work, tokens, mixer) for work in works for tokens in (16, 32) for mixer in ("tssa", "linear")}
    assert "time of the next fastest over that of tssa" in outcome.out
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".svg"]
    assert str(tmp_path) not in next(tmp_path.glob("*.json")).read_text()


def test_no_speed_behind_a_red_gate(run, monkeypatch, tmp_path):  # noqa: F811
    red = GateResult(checks=(Check(name="tssa native dw", error=0.5, bound=1e-5),))
    monkeypatch.setattr(gate, "run_gate", lambda ops: red)
    outcome = run(*SMALL, "--out", str(tmp_path))
    assert outcome.code == 1
    assert "tssa native dw: relative rms 0.5 exceeds 1e-05" in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_explained(run, green_gate):  # noqa: F811
    unknown = run("bench", "lra", "--mixers", "tssa,lineer")
    assert unknown.code == 2
    assert "lineer: not a mixer; the mixers are: tssa" in unknown.err
    assert run("bench", "lra", "--lengths", "1k").code == 2


def test_an_interrupt_keeps_what_is_finished(run, green_gate, monkeypatch, tmp_path):  # noqa: F811
    from tost.bench.lra import run as bench_lra

    build = bench_lra._build

    def stop_at_the_second_length(scale, case, name):
        if case.tokens == 32:
            raise KeyboardInterrupt
        return build(scale, case, name)

    monkeypatch.setattr(bench_lra, "_build", stop_at_the_second_length)
    outcome = run(*SMALL, "--out", str(tmp_path))
    assert outcome.code == 130
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".partial.json")
    assert len(json.loads(path.read_text())["rows"]) == 2
