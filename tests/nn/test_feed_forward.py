"""ISTA against its formula and the problem it is a step on; the convolution of a grid written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tost.nn import ISTA, GridConvolution
from tost.testing import assert_close

B, N, C = 2, 7, 10


def tokens(n=N, dtype=torch.float64):
    return torch.randn(B, n, C, dtype=dtype)


def test_ista_is_its_formula_with_every_gradient():
    module, x = ISTA(C, step_size=0.3, threshold=0.2, dtype=torch.float64), tokens().requires_grad_()
    D, eta, lam = module.dictionary, 0.3, 0.2
    columns = x.mT  # [B, C, N]: tokens as columns, as the formula has them
    inner = columns + eta * (D.T @ columns - D.T @ D @ columns) - eta * lam
    expected = inner.clamp_min(0).mT
    assert_close("y", module(x), expected, 1e-14)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, D), cotangent)
    for got, want in zip(torch.autograd.grad(module(x), (x, D), cotangent), wanted, strict=True):
        assert_close("gradient", got, want, 1e-13)


@given(
    step=st.floats(0.01, 1.0), threshold=st.floats(0.0, 1.0), seed=st.integers(0, 10), rows=st.sampled_from([1, 3, 8])
)
@settings(max_examples=25)
def test_ista_is_a_proximal_step_on_the_lasso(step, threshold, seed, rows):
    torch.manual_seed(seed)
    module, x = ISTA(C, step_size=step, threshold=threshold, dtype=torch.float64), tokens(rows)
    a = x.clone().requires_grad_()
    smooth = (x - a @ module.dictionary.T).square().sum() / 2
    (slope,) = torch.autograd.grad(smooth, a)
    moved = x - step * slope
    # The proximal operator of step * threshold * |a|_1 over a >= 0, from its definition as a minimum: on each entry
    # (a - moved)^2 / 2 + step * threshold * a is convex, so no other a >= 0 may be better.
    y = module(x)

    def price(code):
        return (code - moved).square() / 2 + step * threshold * code

    assert (y >= 0).all()
    for other in (y + 1e-3, (y - 1e-3).clamp_min(0), torch.zeros_like(y)):
        assert (price(other) >= price(y) - 1e-12).all()


def convolved(x, weight, rows, columns):
    """Sum over the window of each token, written out."""
    reach, y = weight.shape[-1] // 2, torch.zeros_like(x)
    for r in range(rows):
        for c in range(columns):
            for dr in range(-reach, reach + 1):
                for dc in range(-reach, reach + 1):
                    if 0 <= r + dr < rows and 0 <= c + dc < columns:
                        kernel = weight[:, 0, dr + reach, dc + reach]
                        y[:, r * columns + c] += kernel * x[:, (r + dr) * columns + c + dc]
    return y


@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (4, 3), (5, 5)])
def test_grid_mixer_is_a_depthwise_convolution(width, grid):
    module, x = GridConvolution(C, width=width, dtype=torch.float64), tokens(grid[0] * grid[1])
    assert_close("y", module(x, grid), convolved(x, module.weight.detach(), *grid), 1e-13)


def test_grid_mixer_treats_padding_as_beyond_the_edge():
    module, x = GridConvolution(C, dtype=torch.float64), tokens(12)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[:2, :2] = True
    x[:, ~mask.flatten()] = float("nan")
    y = module(x, (4, 3), mask.flatten().expand(B, -1))
    assert_close("y", y[:, mask.flatten()], module(x[:, mask.flatten()], (2, 2)), 1e-13)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GridConvolution(C, width=4), "width=4 has no centre; use an odd number"),
        (lambda: GridConvolution(C, width=-1), "width=-1 has no centre"),
        (lambda: GridConvolution(C)(torch.zeros(1, 6, C), (2, 2)), r"grid=\(2, 2\) does not hold the 6 tokens"),
        (lambda: GridConvolution(C)(torch.zeros(1, 6, C), None), r"grid=None does not hold.*rows \* columns = N"),
        (lambda: GridConvolution(C)(torch.zeros(1, 6, C + 1), (2, 3)), r"needs \[B, N, 10\]"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
