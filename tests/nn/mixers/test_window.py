"""Attention over a window against its definition; pieces, padding, and a state that does not grow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tiny import perturb
from tost.nn import WindowAttention
from tost.testing import assert_close

B, N, C, H = 2, 13, 12, 3
D = C // H
windows = st.sampled_from((1, 2, 5, N, 40))


def make(window, dtype=torch.float64):
    torch.manual_seed(0)
    return perturb(WindowAttention(C, H, window=window, dtype=dtype))


def tokens(dtype=torch.float64):
    return torch.randn(B, N, C, dtype=dtype, generator=torch.Generator().manual_seed(1))


def definition(module, x):
    """The output for one sequence x [N, C], token by token."""
    q, k, v = module.proj_in(x).view(len(x), 3, H, D).unbind(1)
    rows = []
    for n in range(len(x)):
        near = slice(max(0, n + 1 - module.window), n + 1)
        weights = (torch.einsum("hd,mhd->hm", q[n], k[near]) / D**0.5).softmax(dim=-1)
        rows.append(torch.einsum("hm,mhd->hd", weights, v[near]).flatten())
    return module.proj_out(torch.stack(rows))


@pytest.mark.parametrize("window", [1, 2, 5, N - 1, N, 40])
def test_attention_is_its_definition_with_every_gradient(window):
    module, x = make(window), tokens().requires_grad_()
    expected = torch.stack([definition(module, sequence) for sequence in x])
    y, variables, cotangent = module(x), (x, *module.parameters()), torch.randn_like(expected)
    assert_close("y", y, expected, 1e-12)
    gradients = torch.autograd.grad(expected, variables, cotangent)
    for got, want in zip(torch.autograd.grad(y, variables, cotangent), gradients, strict=True):
        assert_close("gradient", got, want, 1e-11)


@settings(max_examples=25)
@given(
    window=windows,
    cuts=st.lists(st.integers(0, N), max_size=4),
    real=st.none() | st.lists(st.booleans(), min_size=N, max_size=N),
)
def test_pieces_give_what_the_whole_gives_in_a_state_of_constant_size(window, cuts, real):
    module, x, state, outputs = make(window), tokens(), None, []
    mask = None if real is None else torch.tensor([real, real[::-1]])
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), N], strict=True):
        y, state = module.forward_with_state(x[:, begin:end], state, None if mask is None else mask[:, begin:end])
        outputs.append(y)
        assert state.keys.shape == state.values.shape == (B, H, window - 1, D)
    whole, after = module.forward_with_state(x, mask=mask)
    assert_close("y", torch.cat(outputs, dim=1), whole, 1e-12)
    for name in state._fields:
        assert_close(name, getattr(state, name).double(), getattr(after, name).double(), 1e-12)


@settings(max_examples=25)
@given(
    window=windows,
    real=st.lists(st.booleans(), min_size=N, max_size=N),
    filler=st.sampled_from([7.0, float("nan"), float("inf")]),
)
def test_mask_is_deletion(window, real, filler):
    module, x, mask = make(window), tokens(), torch.tensor([real, real[::-1]])
    x[~mask] = filler
    with torch.no_grad():
        y, state = module.forward_with_state(x, mask=mask)
        following, _ = module.forward_with_state(tokens()[:, :1], state)
    for row in range(B):
        assert torch.equal(y[row][~mask[row]], module.proj_out.bias.expand(int((~mask[row]).sum()), C))
        alone = module(torch.cat((x[row][mask[row]], tokens()[row, :1])).unsqueeze(0))[0]
        assert_close("y", torch.cat((y[row][mask[row]], following[row])), alone, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    module, x = make(4).to(dtype), tokens(dtype)
    y, state = module.forward_with_state(x)
    assert (y.dtype, state.keys.dtype) == (dtype, dtype)
    assert_close("y", y.double(), module.double()(x.double()), 1e-5 if dtype == torch.float32 else 6e-2)


def test_wrong_windows_and_states_are_refused():
    with pytest.raises(ValueError, match="window=0 is not possible"):
        WindowAttention(C, H, window=0)
    _, state = make(4).forward_with_state(tokens())
    with pytest.raises(ValueError, match=r"keys of shape \(2, 3, 3, 4\), but 2 sequences and this attention need"):
        make(5).forward_with_state(tokens(), state)
    assert "window=4" in repr(make(4))
