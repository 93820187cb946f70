"""The bias of every token in place of a table by position."""

import pytest
import torch

from tests.ops.cases import BACKENDS
from tost.ops import causal_membership, causal_tssa, causal_tssa_with_state
from tost.testing import assert_close

B, N, H, D, L = 2, 13, 3, 4, 20


def inputs(masked):
    w = torch.randn(B, N, H, D, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(H, L, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(B, N) > 0.3 if masked else None
    places = torch.arange(N).unsqueeze(0) if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    return w, torch.randn(H, dtype=torch.float64), bias, mask, places


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_looked_up_bias_is_the_table(masked, backend):
    w, temperature, bias, mask, places = inputs(masked)
    found, expected = (
        causal_tssa(w, temperature, given, mask=mask, count_scaled=True, decay=torch.full((H,), 0.9), backend=backend)
        for given in (bias.t()[places], bias)
    )
    assert_close("y", found, expected, 1e-13)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (w, bias)) for y in (found, expected)), strict=True):
        assert_close("gradient", a, b, 1e-12)
    pi = [causal_membership(w, temperature, given, mask=mask) for given in (bias.t()[places], bias)]
    assert_close("pi", *pi, 1e-13)


def test_it_goes_with_the_tokens_and_not_with_the_position():
    w, temperature, bias, _, places = inputs(False)
    per_token = bias.t()[places]
    with torch.no_grad():
        first, state = causal_tssa_with_state(w[:, :5], temperature, per_token[:, :5])
        second, _ = causal_tssa_with_state(w[:, 5:], temperature, per_token[:, 5:], state=state)
        whole = causal_tssa(w, temperature, per_token)
    assert_close("pieces", torch.cat((first, second), dim=1), whole, 1e-12)


@pytest.mark.parametrize("shape", [(B, N - 1, H), (3, N, H), (B, N, H + 1)])
def test_other_shapes_are_refused(shape):
    w, temperature, *_ = inputs(False)
    with pytest.raises(ValueError, match=r"the bias of every token is a floating point tensor \[2, 13, 3\] or \[1, 13"):
        causal_tssa(w, temperature, torch.zeros(shape, dtype=torch.float64))
