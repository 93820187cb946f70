"""Damped moving averages: the convolution against the recurrence, and what masks, types and limits do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tost.nn import DampedEMA
from tost.testing import assert_close

B, C, S = 2, 5, 3


def make(dtype=torch.float64):
    torch.manual_seed(0)
    module = DampedEMA(C, num_averages=S, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return module


def recurrence(module, x):
    """The two averages, token by token."""
    alpha, delta = module.alpha.sigmoid(), module.delta.sigmoid()
    kept, N = 1 - alpha * delta, x.shape[1]
    forward = backward = x.new_zeros(x.shape[0], C, S)
    y = [x.new_zeros(x.shape[0], C)] * N
    for n in range(N):
        forward = alpha[0] * x[:, n, :, None] + kept[0] * forward
        y[n] = y[n] + (module.weight[0] * forward).sum(-1)
    for n in reversed(range(N - 1)):
        backward = alpha[1] * x[:, n + 1, :, None] + kept[1] * backward
        y[n] = y[n] + (module.weight[1] * backward).sum(-1)
    return torch.stack(y, dim=1)


@pytest.mark.parametrize("length", [1, 2, 9, 70])
def test_convolution_is_the_recurrence_with_every_gradient(length):
    module, x = make(), torch.randn(B, length, C, dtype=torch.float64, requires_grad=True)
    found, wanted, cotangent = module(x), recurrence(module, x), torch.randn_like(x)
    assert_close("y", found, wanted, 1e-12)
    variables = (x, *module.parameters())
    for a, b in zip(
        torch.autograd.grad(found, variables, cotangent),
        torch.autograd.grad(wanted, variables, cotangent),
        strict=True,
    ):
        assert_close("gradient", a, b, 1e-10)


@given(st.lists(st.booleans(), min_size=1, max_size=14))
@settings(max_examples=40)
def test_padding_anywhere_is_deletion(real):
    module, x = make(), torch.randn(B, len(real), C, dtype=torch.float64)
    mask = torch.stack((torch.tensor(real), torch.tensor(real).flip(0)))
    y = module(x.masked_fill(~mask.unsqueeze(-1), float("nan")), mask)
    assert not y[~mask].any()
    for row in range(B):
        assert_close("alone", y[row, mask[row]], module(x[row, mask[row]][None])[0], 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_other_types_and_autocast_change_little(dtype, bound):
    x = torch.randn(B, 40, C, dtype=torch.float64)
    exact, module = make()(x), make().to(dtype)
    assert module(x.to(dtype)).dtype == dtype
    assert_close("y", module(x.to(dtype)), exact, bound)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close("autocast", make()(x), exact, 1e-12)


def test_fresh_averages_have_half_lives_from_one_to_seventy_tokens():
    module = DampedEMA(2, num_averages=4)
    kept = 1 - module.alpha.sigmoid() * module.delta.sigmoid()
    half_lives = (torch.tensor(0.5).log() / kept.log())[0, 0]
    assert half_lives.tolist() == sorted(half_lives.tolist(), reverse=True)
    assert 1 < half_lives[-1] < 2
    assert 60 < half_lives[0] < 80


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="num_averages=0 leaves nothing; use at least 1"):
        DampedEMA(C, num_averages=0)
    with pytest.raises(ValueError, match=r"this module needs \[B, N, 5\]"):
        make()(torch.zeros(1, 2, 3))


def test_rates_do_not_decay_in_a_model():
    model = tost.create_model("lra_image", embed_dim=16, depth=1, num_heads=4, num_averages=2)
    assert model.no_weight_decay() == {"blocks.0.conv.alpha", "blocks.0.conv.delta"}
    assert model.slow_parameters() == set()
