"""What must hold for any input: the operator's symmetries, and that it never looks where it should not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.ops.cases import BACKENDS
from tost import objective
from tost.testing import assert_close

backends = pytest.mark.parametrize("backend", BACKENDS)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 90), st.integers(1, 4), st.integers(1, 9))
seeds = st.integers(0, 2**31)
examples = settings(max_examples=25, deadline=None)
BOUND = 1e-10


def draw(size, seed):
    g = torch.Generator().manual_seed(seed)
    B, N, H, D = size
    w = torch.randn(B, N, H, D, dtype=torch.float64, generator=g)
    temperature = 4 * torch.randn(H, dtype=torch.float64, generator=g)
    bias = 0.3 * torch.randn(H, N, dtype=torch.float64, generator=g)
    return w, temperature, bias, g


@backends
@examples
@given(size=sizes, seed=seeds)
def test_tssa_commutes_with_permutations_of_tokens_and_heads(backend, size, seed):
    w, t, _, g = draw(size, seed)
    tokens, heads = torch.randperm(size[1], generator=g), torch.randperm(size[2], generator=g)
    y = tost.tssa(w, t, backend=backend)
    assert_close("tokens", tost.tssa(w[:, tokens], t, backend=backend), y[:, tokens], BOUND)
    assert_close("heads", tost.tssa(w[:, :, heads], t[heads], backend=backend), y[:, :, heads], BOUND)


@backends
@examples
@given(size=sizes, seed=seeds)
def test_causal_tssa_commutes_with_permutations_of_heads(backend, size, seed):
    w, t, bias, g = draw(size, seed)
    heads = torch.randperm(size[2], generator=g)
    y = tost.causal_tssa(w, t, bias, backend=backend)
    assert_close("y", tost.causal_tssa(w[:, :, heads], t[heads], bias[heads], backend=backend), y[:, :, heads], BOUND)


@backends
@examples
@given(size=sizes, seed=seeds, keep=st.floats(0.1, 1.0))
def test_mask_equals_deletion(backend, size, seed, keep):
    w, t, bias, g = draw(size, seed)
    mask = torch.rand(size[:2], generator=g) < keep
    garbage = w.masked_fill(~mask[..., None, None], float("nan"))
    y = tost.tssa(garbage, t, mask=mask, backend=backend)
    causal = tost.causal_tssa(garbage, t, bias, mask=mask, backend=backend)
    assert not y[~mask].any()
    assert not causal[~mask].any()
    for b in range(size[0]):
        alone = w[b : b + 1, mask[b]]
        assert_close("tssa", y[b : b + 1, mask[b]], tost.tssa(alone, t, backend=backend), BOUND)
        assert_close("causal", causal[b : b + 1, mask[b]], tost.causal_tssa(alone, t, bias, backend=backend), BOUND)


@backends
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_one_side_leaves_outputs_state_and_gradients_alone(backend, side):
    w, t, bias, g = draw((1, 40, 3, 5), 3)
    padding = torch.full((1, 17, 3, 5), float("nan"), dtype=torch.float64)
    parts, flags = [w, padding], [torch.ones(1, 40, dtype=torch.bool), torch.zeros(1, 17, dtype=torch.bool)]
    if side == "left":
        parts, flags = parts[::-1], flags[::-1]
    mask = torch.cat(flags, dim=1)
    padded, plain = torch.cat(parts, dim=1).requires_grad_(), w.clone().requires_grad_()
    y, state = tost.causal_tssa_with_state(plain, t, bias, backend=backend)
    z, padded_state = tost.causal_tssa_with_state(padded, t, bias, mask=mask, backend=backend)
    assert_close("y", z[mask], y[0], BOUND)
    for name in state._fields:
        assert_close(name, getattr(padded_state, name), getattr(state, name), BOUND)
    cotangent = torch.randn(40, 3, 5, dtype=torch.float64, generator=g)
    y[0].backward(cotangent)
    z[mask].backward(cotangent)
    assert_close("dw", padded.grad[mask], plain.grad[0], BOUND)
    assert not padded.grad[~mask].any()


@backends
@examples
@given(size=sizes, seed=seeds, data=st.data())
def test_causal_tssa_never_sees_the_future(backend, size, seed, data):
    w, t, bias, g = draw(size, seed)
    cut = data.draw(st.integers(0, size[1]))
    changed = torch.cat((w[:, :cut], 1e3 * torch.randn(w[:, cut:].shape, generator=g, dtype=w.dtype)), dim=1)
    y = tost.causal_tssa(w, t, bias, backend=backend)
    assert torch.equal(tost.causal_tssa(changed, t, bias, backend=backend)[:, :cut], y[:, :cut])


@backends
@examples
@given(size=sizes, seed=seeds, data=st.data())
def test_causal_tssa_may_be_split_anywhere(backend, size, seed, data):
    w, t, bias, g = draw(size, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, size[1]), max_size=4)))
    mask = torch.rand(size[:2], generator=g) < 0.8
    w.requires_grad_()
    whole, state = tost.causal_tssa_with_state(w, t, bias, mask=mask, backend=backend)
    pieces, carried = [], None
    for begin, end in zip([0, *cuts], [*cuts, size[1]], strict=True):
        y, carried = tost.causal_tssa_with_state(
            w[:, begin:end], t, bias, mask=mask[:, begin:end], state=carried, backend=backend
        )
        pieces.append(y)
    joined = torch.cat(pieces, dim=1)
    assert_close("y", joined, whole, BOUND)
    for name in state._fields:
        assert_close(name, getattr(carried, name), getattr(state, name), BOUND)
    cotangent = torch.randn(whole.shape, dtype=w.dtype, generator=g)
    (expected,) = torch.autograd.grad(whole, w, cotangent)
    (through_state,) = torch.autograd.grad(joined, w, cotangent)
    assert_close("dw", through_state, expected, 1e-9)


@backends
def test_step_by_step_equals_the_full_pass(backend):
    w, t, bias, _ = draw((2, 70, 3, 5), 7)
    whole, state = tost.causal_tssa_with_state(w, t, bias, backend=backend)
    carried, steps = None, []
    for n in range(70):
        y, carried = tost.causal_tssa_step(w[:, n], t, bias, state=carried, backend=backend)
        steps.append(y)
    assert_close("y", torch.stack(steps, dim=1), whole, BOUND)
    assert_close("mass", carried.mass, state.mass, BOUND)
    assert sum(x[0].numel() for x in carried[:3]) == 3 * (2 * 5 + 1)


@backends
@examples
@given(size=sizes, seed=seeds)
def test_memberships_are_the_ones_the_operator_uses(backend, size, seed):
    w, t, bias, _ = draw(size, seed)
    pi = tost.membership(w, t)
    assert_close("rows sum to one", pi.sum(-1), torch.ones(size[:2]), BOUND)
    moment = (pi.unsqueeze(-1) * w.square()).sum(1) / (pi.sum(1) + 1e-8).unsqueeze(-1)
    assert_close("y", tost.tssa(w, t, backend=backend), -pi.unsqueeze(-1) * w / (1 + moment.unsqueeze(1)), BOUND)
    pi = tost.causal_membership(w, t, bias)
    assert_close(
        "first token ignores its input",
        pi[:, 0],
        (t * size[3] * (1 + bias[:, 0])).softmax(0).expand_as(pi[:, 0]),
        BOUND,
    )


@backends
def test_operator_is_minus_n_times_the_gradient_of_the_variational_objective(backend):
    """An independent derivation: autograd of the objective, orthonormal heads, W = U, memberships held fixed."""
    g = torch.Generator().manual_seed(0)
    n, d, K = 50, 24, 4
    u = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=g)).Q.reshape(d, K, d // K).transpose(0, 1)
    z = torch.randn(n, d, dtype=torch.float64, generator=g, requires_grad=True)
    w = torch.einsum("nd,kdp->nkp", z, u)
    temperature = torch.randn(K, dtype=torch.float64, generator=g)
    pi = tost.membership(w[None], temperature)[0].detach()
    (gradient,) = torch.autograd.grad(objective.variational_compression(z, pi, u, eps=d**0.5), z)
    y = tost.tssa(w.detach()[None], temperature, backend=backend)[0]
    # The operator adds 1e-8 to the mass of a group; the objective does not.
    assert_close("y", torch.einsum("nkp,kdp->nd", y, u), -n * gradient, 1e-8)
