from __future__ import annotations

import pytest
import torch

from tost.bench.harness.gate import Check, GateResult
from tost.bench.ops import gate
from tost.bench.ops.cases import Op
from tost.bench.ops.gate import Candidate, run_gate
from tost.errors import BackendError
from tost.ops import causal_tssa, tssa


@pytest.fixture(autouse=True)
def small_grid(monkeypatch):
    """Two shapes show what a gate does; `tost bench` and its end-to-end test use them all."""
    monkeypatch.setattr(gate, "SHAPES", ((1, 1, 1, 1), (2, 63, 3, 5)))


def check_tssa(call, **options) -> GateResult:
    return run_gate([Op.TSSA], implementations={Op.TSSA: {"candidate": Candidate(call=call, **options)}})


def right(x):
    return tssa(x.w, x.temperature, mask=x.mask, backend="reference")


def test_gate_is_green_for_what_is_ready_here():
    result = run_gate()
    assert result.passed, [check.message for check in result.failures]
    names = {check.name for check in result.checks}
    for op in Op:
        for backend in gate.candidates(op):
            assert f"{op} {backend} 2x63x3x5 float32 dw" in names
        assert f"{op} reference 2x63x3x5 bfloat16 masked dtemperature" in names
        assert f"{op} reference 2x63x3x5 float64 y, overwriting" in names
    assert "causal_tssa reference 2x63x3x5 float32 dbias" in names


def test_gate_checks_the_block_size_that_is_measured():
    result = run_gate(block_size=3)
    assert result.passed, [check.message for check in result.failures]
    names = {check.name for check in result.checks}
    for op in Op:
        assert f"{op} reference 2x63x3x5 float32 dw" in names
        for backend in gate.candidates(op, 3):
            assert f"{op} {backend} g=3 2x63x3x3 float32 masked dw" in names
        assert f"{op} paper eager g=3 2x63x3x3 float32 dw" not in names


def test_gate_is_red_for_a_wrong_output():
    result = check_tssa(lambda x: right(x) * 1.001)
    assert not result.passed
    assert result.summary.endswith("checks FAILED")
    assert any(check.name == "tssa candidate 2x63x3x5 float32 y" for check in result.failures)
    assert "exceeds 1e-05" in next(check for check in result.failures if "float32" in check.name).message


def test_gate_is_red_for_a_wrong_gradient():
    def without_gradient_of_the_membership(x):
        return tssa(x.w, x.temperature.detach(), mask=x.mask, backend="reference")

    failures = check_tssa(without_gradient_of_the_membership).failures
    assert {check.name.split()[-1] for check in failures} == {"dtemperature"}


def test_gate_is_red_for_a_forgotten_mask():
    result = check_tssa(lambda x: tssa(x.w, x.temperature, backend="reference"))
    assert result.failures
    assert all("masked" in check.name for check in result.failures)


def test_gate_is_red_for_a_forgotten_bias():
    def forgets(x):
        return causal_tssa(x.w, x.temperature, None, mask=x.mask, backend="reference")

    implementations = {Op.CAUSAL_TSSA: {"candidate": Candidate(call=forgets)}}
    failures = run_gate([Op.CAUSAL_TSSA], implementations=implementations).failures
    assert {"y", "dbias"} <= {check.name.split()[-1] for check in failures}


def test_gate_is_red_for_a_wrong_overwriting_form():
    failures = check_tssa(right, overwrite=lambda x: x.w).failures
    assert failures
    assert all(check.name.endswith("y, overwriting") for check in failures)


def test_gate_is_red_for_values_that_are_not_numbers():
    assert not check_tssa(lambda x: right(x) * float("nan")).passed
    assert not Check(name="x", error=float("nan"), bound=1.0).passed


def test_gate_lists_what_a_backend_declines():
    def only_float32(x):
        if x.w.dtype != torch.float32:
            raise BackendError("supports float32")
        return right(x)

    result = check_tssa(only_float32)
    assert result.passed
    assert result.declined["tssa candidate 1x1x1x1 float64"] == "supports float32"
    assert result.to_json()["declined"] == result.declined


def test_gate_that_compared_nothing_is_not_green():
    def declines(x):
        raise BackendError("never")

    assert not check_tssa(declines).passed


def test_gate_does_not_change_the_number_of_threads():
    torch.set_num_threads(2)
    check_tssa(right)
    assert torch.get_num_threads() == 2
