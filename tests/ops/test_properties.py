"""What must hold for any input: symmetries, padding, pieces, steps, and the equations themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.ops.cases import (
    FAST_BACKENDS,
    OPERATORS,
    SUMS,
    assert_same_state,
    backends,
    continued,
    make_case,
    on_blocks,
    on_operators,
    plain,
    run_causal,
    run_tssa,
)
from tost import objective
from tost.testing import assert_close

EVERY = {"masked": True, "bias": True, "state": True}
sizes = st.tuples(st.integers(1, 3), st.integers(1, 80), st.integers(1, 4), st.just(6))
seeds = st.integers(0, 2**31)
few, some = settings(max_examples=4, deadline=None), settings(max_examples=8, deadline=None)
LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
BOUND = 1e-9


def make(size, seed, **flags):
    return make_case(size, torch.float64, seed=seed, **EVERY | flags)


# --- Symmetries


@on_blocks()
@few
@given(size=sizes, seed=seeds)
def test_tokens_heads_and_blocks_are_alike(backend, block_size, size, seed):
    case, g = make(size, seed, block_size=block_size), torch.Generator().manual_seed(seed)
    tokens, heads = torch.randperm(size[1], generator=g), torch.randperm(size[2], generator=g)
    y = plain(case, backend)
    permuted = plain(case, backend, w=case.w[:, tokens], mask=case.mask[:, tokens])
    permuted_heads = plain(case, backend, w=case.w[:, :, heads], temperature=case.temperature[heads])
    features = torch.arange(6).unflatten(0, (-1, block_size)).flip(0, 1).flatten()
    assert_close("tokens", permuted, y[:, tokens], BOUND)
    assert_close("heads", permuted_heads, y[:, :, heads], BOUND)
    assert_close("features", plain(case, backend, w=case.w[..., features]), y[..., features], BOUND)


@backends
@few
@given(size=sizes, seed=seeds)
def test_heads_and_features_are_alike_in_the_causal_form(backend, size, seed):
    case = make(size, seed, state=False)
    heads = torch.randperm(size[2], generator=torch.Generator().manual_seed(seed))
    y, _ = continued(case, backend)
    given = {"w": case.w[:, :, heads], "temperature": case.temperature[heads], "bias": case.bias[heads]}
    assert_close("heads", continued(case, backend, **given)[0], y[:, :, heads], BOUND)
    assert_close("features", continued(case, backend, w=case.w.flip(-1))[0], y.flip(-1), BOUND)


# --- Padding, pieces, steps, and the future


@on_blocks()
@few
@given(size=sizes, seed=seeds)
def test_mask_equals_deletion(backend, block_size, size, seed):
    """Whatever stands in the padding, in outputs, the state and gradients."""
    case = make(size, seed, block_size=block_size, state=False)
    case.mask[:, size[1] // 2] = True
    garbage = case.w.masked_fill(~case.mask[..., None, None], float("nan")).requires_grad_()
    alone = case.w.clone().requires_grad_()
    y, state = continued(case, backend, w=garbage)
    z = plain(case, backend, w=garbage)
    parts = []
    for b in range(size[0]):
        row, real = slice(b, b + 1), case.mask[b]
        given = {"w": alone[row, real], "mask": None}
        own, after = continued(case, backend, **given)
        other = plain(case, backend, **given)
        assert (y[row, real] - own).abs().max() < BOUND
        assert (z[row, real] - other).abs().max() < BOUND
        assert_same_state(tost.TSSAState(*(x[row] for x in state)), after, BOUND)
        parts.append(((own + other) * case.dy[row, real]).sum())
    assert not y[~case.mask].any()
    assert not z[~case.mask].any()
    (found,) = torch.autograd.grad(((y + z) * case.dy).sum(), garbage)
    (expected,) = torch.autograd.grad(sum(parts), alone)
    assert not found[~case.mask].any()
    assert_close("dw", found, expected, 1e-7)


@backends
@few
@given(size=sizes, seed=seeds, data=st.data())
def test_sequences_may_be_split_anywhere(backend, size, seed, data):
    """Into pieces of 0 and 1 tokens too; gradients flow through the state."""
    case = make(size, seed)
    cut = data.draw(st.integers(0, size[1]))
    cuts = sorted([cut, cut, min(cut + 1, size[1])])
    inputs = [x.requires_grad_() for x in (case.w, case.temperature, case.bias)]
    whole, state = continued(case, backend)
    pieces, carried = [], case.state
    for begin, end in zip([0, *cuts], [*cuts, size[1]], strict=True):
        rows = slice(begin, end)
        y, carried = continued(case, backend, w=case.w[:, rows], mask=case.mask[:, rows], state=carried)
        pieces.append(y)
    joined = torch.cat(pieces, dim=1)
    assert_close("y", joined, whole, BOUND)
    assert_same_state(carried, state, BOUND)
    cotangents = (case.dy, *case.dstate)
    expected = torch.autograd.grad((whole, *state[:3]), inputs, cotangents)
    found = torch.autograd.grad((joined, *carried[:3]), inputs, cotangents)
    for a, b in zip(found, expected, strict=True):
        assert_close("gradient", a, b, 1e-8)


@backends
def test_steps_equal_the_full_pass(backend):
    case = make((2, 20, 3, 6), 7, masked=False)
    whole, state = continued(case, backend)
    carried, steps = case.state, []
    for token in case.w.unbind(dim=1):
        y, carried = tost.causal_tssa_step(token, case.temperature, case.bias, state=carried, backend=backend)
        steps.append(y)
    assert_close("y", torch.stack(steps, dim=1), whole, BOUND)
    assert_same_state(carried, state, BOUND)


@backends
@few
@given(size=sizes, seed=seeds, data=st.data())
def test_nobody_sees_the_future(backend, size, seed, data):
    case = make(size, seed)
    cut = data.draw(st.integers(0, size[1]))
    later = case.w.clone()
    later[:, cut:] = float("inf")
    changed, _ = continued(case, backend, w=later)
    assert torch.equal(changed[:, :cut], continued(case, backend)[0][:, :cut])


@backends
@few
@given(size=sizes, seed=seeds)
def test_bias_of_every_token_is_the_table_at_its_position(backend, size, seed):
    case = make(size, seed, state=False)
    places = (case.mask.cumsum(1) - 1).clamp_min(0)
    table = case.bias.requires_grad_()
    found, expected = (continued(case, backend, bias=bias)[0] for bias in (table.t()[places], table))
    assert_close("y", found, expected, 1e-13)
    assert_close("dbias", *(torch.autograd.grad(y, table, case.dy)[0] for y in (found, expected)), 1e-11)
    given = {"mask": case.mask}
    pi = [tost.causal_membership(case.w, case.temperature, bias, **given) for bias in (table.t()[places], table)]
    assert_close("pi", *pi, 1e-13)


@some
@given(size=sizes, seed=seeds)
def test_states_merge_in_any_grouping_and_as_the_recurrence_does(size, seed):
    case = make(size, seed, masked=False)
    whole = continued(case, "auto")[1]
    zeros = {name: torch.zeros_like(getattr(case.state, name)) for name in SUMS[1:]}
    piece = continued(case, "auto", state=case.state._replace(**zeros))[1]
    own = continued(case, "auto", state=None)[1]
    piece = piece._replace(squares=own.squares, position=own.position)
    assert_same_state(case.state.merge(piece), whole, BOUND)
    assert_same_state(case.state.merge(piece).merge(whole), case.state.merge(piece.merge(whole)), BOUND)
    empty = tost.TSSAState.empty(*size[:1], *size[2:], dtype=torch.float64)
    for same in (empty.merge(piece), piece.merge(empty)):
        assert all(map(torch.equal, same, piece))


# --- The equations in other words


@backends
@few
@given(size=sizes, seed=seeds)
def test_causal_form_is_its_equation_with_a_triangular_matrix(backend, size, seed):
    case, N = make(size, seed, masked=False, state=False), size[1]
    upto = torch.ones(N, N, dtype=torch.float64).tril()
    square = case.w.square()
    share = square / torch.einsum("nm,bmhd->bnhd", upto, square).clamp_min(1e-12)
    pi = (case.temperature * (share.sum(dim=-1) + 6 * case.bias[:, :N].t())).softmax(dim=-1)
    mass = torch.einsum("nm,bmh->bnh", upto, pi) + 1e-8
    moment = torch.einsum("nm,bmh,bmhd->bnhd", upto, pi, square) / mass.unsqueeze(-1)
    y, state = continued(case, backend)
    assert_close("pi", tost.causal_membership(case.w, case.temperature, case.bias), pi, BOUND)
    assert_close("mass", state.mass, mass[:, -1], 1e-7)
    assert_close("y", y, -pi.unsqueeze(-1) * case.w / (1 + moment), BOUND)


@on_blocks(sizes=(1, 2, 3, 6))
@few
@given(size=sizes, seed=seeds)
def test_output_solves_the_equations_of_its_block(backend, block_size, size, seed):
    case = make(size, seed, block_size=block_size, masked=False)
    pi = tost.membership(case.w, case.temperature)
    y = plain(case, backend)
    assert_close("rows sum to one", pi.sum(-1), torch.ones(size[:2]), BOUND)
    w, u = case.w.unflatten(-1, (-1, block_size)), (-y / pi.unsqueeze(-1)).unflatten(-1, (-1, block_size))
    moments = torch.einsum("bnh,bnhki,bnhkj->bhkij", pi, w, w) / (pi.sum(1) + 1e-8)[..., None, None, None]
    assert_close("(I + S) u = w", u + torch.einsum("bhkij,bnhkj->bnhki", moments, u), w, BOUND)
    last = tost.causal_membership(case.w, case.temperature)[:, -1]
    assert_close("pi of the last token", last, pi[:, -1], BOUND)


@on_blocks()
def test_operator_is_minus_n_times_the_gradient_of_the_variational_objective(backend, block_size):
    """An independent derivation: autograd of the objective, orthonormal heads, W = U, memberships held fixed."""
    g = torch.Generator().manual_seed(0)
    n, d, K = 50, 24, 4
    u = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=g)).Q.reshape(d, K, d // K).transpose(0, 1)
    z = torch.randn(n, d, dtype=torch.float64, generator=g, requires_grad=True)
    w = torch.einsum("nd,kdp->nkp", z, u)
    temperature = torch.randn(K, dtype=torch.float64, generator=g)
    pi = tost.membership(w[None], temperature)[0].detach()
    rate = objective.variational_compression(z, pi, u, eps=d**0.5, block_size=block_size)
    (gradient,) = torch.autograd.grad(rate, z)
    y = tost.tssa(w.detach()[None], temperature, backend=backend, block_size=block_size)[0]
    # The operator adds 1e-8 to the mass of a group; the objective does not.
    assert_close("y", torch.einsum("nkp,kdp->nd", y, u), -n * gradient, 1e-8)


# --- Extreme inputs


@on_blocks()
@pytest.mark.parametrize("size", [(0, 5, 2, 6), (2, 0, 2, 6), (0, 0, 1, 6), (1, 1, 1, 6)], ids=str)
def test_empty_batches_and_sequences(backend, block_size, size):
    case = make_case(size, torch.float32, block_size=block_size, **EVERY)
    results = run_causal(case, backend)
    for name, value in (results | run_tssa(case, backend)).items():
        assert torch.isfinite(value).all(), name
    if size[1] == 0:
        for name, d_after in zip(SUMS, case.dstate, strict=True):
            assert torch.equal(results[name], getattr(case.state, name))
            assert torch.equal(results[f"d{name}"], d_after)


@pytest.mark.parametrize("backend", [name for name in FAST_BACKENDS if name != "triton"])
def test_tokens_of_any_size_in_any_direction_have_bounded_outputs(backend):
    """Where rounding swallows the identity, factors without a floor would divide by nothing but rounding errors."""
    line, noise = 1e6 * torch.randn(1, 50, 2, 1) * torch.randn(1, 1, 1, 8), 1e-2 * torch.randn(1, 50, 2, 8)
    w = line + noise
    y = tost.tssa(w, torch.ones(2), block_size=8, backend=backend)
    z = tost.gated_tssa(w, torch.rand(1, 50, 2, 1), backend=backend)
    for out in (y, z):
        assert out.isfinite().all()
    assert (y.norm(dim=-1) <= 1.01 * w.norm(dim=-1)).all()
    # About the mean: no further away than tokens are from each other.
    assert z.norm(dim=-1).max() <= 2.02 * w.norm(dim=-1).max()


@on_operators(FAST_BACKENDS)
@LOW
def test_half_precision_and_autocast_keep_statistics_in_float32(backend, run, dtype):
    case = make_case((2, 40, 3, 6), dtype, masked=True)
    w, t = case.w, case.temperature
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, wide = (run(x, t, mask=case.mask, backend=backend) for x in (w, w.float()))
    expected = run(w.double(), t.double(), mask=case.mask, backend="reference")
    assert y.dtype == dtype
    assert_close("y", y, expected, 1e-2)
    assert_close("in float32", wide, expected, 1e-4 if run is OPERATORS["gated"] else 1e-5)


@on_blocks(FAST_BACKENDS)
@LOW
@pytest.mark.parametrize("run", [run_tssa, run_causal], ids=["tssa", "causal"])
def test_gradients_in_half_precision_are_rounded_once(backend, block_size, dtype, run):
    """Not once for every statistic that they pass through: such terms may cancel."""
    case = make_case((2, 67, 3, 6), dtype, block_size=block_size)
    expected = run(case.double(), "reference")["dw"]
    assert_close("dw", run(case, backend)["dw"], expected.to(dtype), 0.05 * torch.finfo(dtype).eps)
