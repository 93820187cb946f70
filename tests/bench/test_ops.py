from __future__ import annotations

import pytest
import torch

from tost.bench import ops
from tost.bench.ops import Candidate, Case, Ops, build_layer, check_operators
from tost.errors import BackendError, ConfigError


def test_standard_cases_are_the_papers_sizes():
    cases = Ops().cases
    assert {(case.op, case.width, case.heads, case.block_size) for case in cases} == {
        ("tssa", 384, 8, 1),
        ("causal_tssa", 768, 12, 1),
        ("gated_tssa", 768, 12, 8),
    }
    assert (len(cases), len(set(cases))) == (20, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"width": 100, "heads": 8}, "does not divide into heads"), ({"block_size": 5}, "does not divide the head width")],
)
def test_impossible_sizes_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Ops(**options)


@pytest.mark.parametrize("op", ops.OPS)
def test_contenders_keep_the_shape_and_ours_equal_the_paper(op):
    g = 4 if op == "gated_tssa" else 1
    case = Case(op, batch=2, tokens=9, width=16, heads=2, dtype="float64", block_size=g)
    ours, x = build_layer("tost", case).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    for name in ops.CONTENDERS:
        if name != "paper compiled" and (op == "tssa" or name != "xca") and (g == 1 or name != "paper eager"):
            assert build_layer(name, case, ours).double()(x).shape == x.shape
    same = "paper eager" if g == 1 else "tost-torch"
    torch.testing.assert_close(build_layer(same, case, ours).double()(x), ours(x))


def test_the_gate_is_green_here(monkeypatch):
    monkeypatch.setattr(ops, "_CHECKED", ops._CHECKED[:2])
    gate = check_operators(block_size=5)
    assert gate.passed, gate.failures
    assert {check.name.split()[0] for check in gate.checks if "g=5" in check.name} == {"tssa", "gated_tssa"}


@pytest.mark.parametrize("fault", ["value", "gradient", "in-place"])
def test_the_gate_sees_a_wrong_implementation(monkeypatch, fault):
    monkeypatch.setattr(ops, "_CHECKED", ((2, 9, 3, 4),))

    def call(x):
        y = ops.tssa(*x.arguments.values(), mask=x.mask, backend="reference")
        factor = 1.01 if fault == "value" else 1.0
        return factor * y + (0.01 * (x.arguments["w"] - x.arguments["w"].detach()) if fault == "gradient" else 0)

    overwrite = (lambda x: 1.01 * call(x)) if fault == "in-place" else call
    gate = check_operators(["tssa"], implementations={"mutant": Candidate(call, overwrite)})
    assert not gate.passed
    ending = {"value": " y", "gradient": " dw", "in-place": " y, overwriting"}[fault]
    assert any(check.name.endswith(ending) for check in gate.failures)


def test_declined_calls_are_listed_and_not_failures(monkeypatch):
    monkeypatch.setattr(ops, "_CHECKED", ((1, 4, 2, 2),))

    def decline(x):
        raise BackendError("not for bfloat16")

    gate = check_operators(["tssa"], implementations={"picky": Candidate(decline, takes_mask=False)})
    assert set(gate.declined.values()) == {"not for bfloat16"}
    assert not gate.passed  # nothing was compared


def test_long_softmax_attention_is_skipped_with_a_forecast(monkeypatch):
    monkeypatch.setattr(ops, "_PROBE_TOKENS", 16)
    monkeypatch.setattr(ops, "_SKIP_SECONDS", 0.0)
    bench = Ops(op=("tssa",), mode=("fwd",), tokens=(32,), width=16, heads=2, repeats=3, compile=False, quick=True)
    results = {"rows": []}
    assert len(list(bench.measure(results, lambda line: None))) == bench.steps == 1
    skipped = {row["contender"]: row["note"] for row in results["rows"] if not row["repeats"]}
    assert skipped["sdpa"].startswith("skipped: about")
    assert "sdpa: skipped" in bench.tables(results)[0].notes[0]
