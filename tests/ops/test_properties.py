"""What must hold for any input and every form: symmetries, padding, pieces, steps, and the equations themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.ops.cases import (
    BACKENDS,
    BLOCK_BACKENDS,
    FAST_BACKENDS,
    FAST_BLOCK_BACKENDS,
    FORMS,
    WHOLE_FORMS,
    assert_same_state,
    causal,
    make_case,
    on_forms,
    options,
    part,
    run_causal,
    run_tssa,
    whole_options,
)
from tost import objective
from tost.testing import assert_close

backends = pytest.mark.parametrize("backend", BACKENDS)
block_backends = pytest.mark.parametrize("backend", BLOCK_BACKENDS)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 80), st.integers(1, 4), st.just(6))
seeds = st.integers(0, 2**31)
few, some = settings(max_examples=4, deadline=None), settings(max_examples=8, deadline=None)
BOUND = 1e-9


def make(size, seed, form, **flags):
    return make_case(size, torch.float64, seed=seed, **({"masked": True, "bias": True, "state": True} | form | flags))


# --- Symmetries


@on_forms(forms=WHOLE_FORMS)
@few
@given(size=sizes, seed=seeds)
def test_tokens_heads_and_blocks_are_alike(backend, form, size, seed):
    case, g = make(size, seed, form), torch.Generator().manual_seed(seed)
    tokens, heads = torch.randperm(size[1], generator=g), torch.randperm(size[2], generator=g)
    given = whole_options(case, backend=backend)
    y = tost.tssa(case.w, case.temperature, **given)
    permuted = tost.tssa(case.w[:, tokens], case.temperature, **given | {"mask": case.mask[:, tokens]})
    permuted_heads = tost.tssa(case.w[:, :, heads], case.temperature[heads], **given)
    features = torch.arange(6).unflatten(0, (-1, case.block_size)).flip(0, 1).flatten()
    assert_close("tokens", permuted, y[:, tokens], BOUND)
    assert_close("heads", permuted_heads, y[:, :, heads], BOUND)
    assert_close("features", tost.tssa(case.w[..., features], case.temperature, **given), y[..., features], BOUND)


@on_forms()
@few
@given(size=sizes, seed=seeds)
def test_heads_and_blocks_are_alike_in_the_causal_form(backend, form, size, seed):
    case = make(size, seed, form, state=False)
    heads = torch.randperm(size[2], generator=torch.Generator().manual_seed(seed))
    decay = case.decay
    if decay is not None:
        decay = decay[heads] if decay.dim() == 1 else decay[:, :, heads]
    y, _ = causal(case, backend)
    permuted, _ = causal(
        case, backend, w=case.w[:, :, heads], temperature=case.temperature[heads], bias=case.bias[heads], decay=decay
    )
    assert (permuted - y[:, :, heads]).abs().max() < BOUND  # a first token is its own mean, so that y may be 0
    features = torch.arange(6).unflatten(0, (-1, case.block_size)).flip(0, 1).flatten()
    decay = case.decay.flip(-1) if case.decay is not None and case.decay.dim() == 4 else case.decay
    permuted, _ = causal(case, backend, w=case.w[..., features], decay=decay)
    assert (permuted - y[..., features]).abs().max() < BOUND


@backends
@some
@given(size=sizes, seed=seeds, times=st.integers(2, 4))
def test_scaled_energies_do_not_flatten_when_every_token_is_repeated(backend, size, seed, times):
    case = make(size, seed, {"count_scaled": True})
    given = {"mask": case.mask, "count_scaled": True}
    repeated = {"mask": case.mask.repeat(1, times), "count_scaled": True}
    w = case.w.repeat(1, times, 1, 1)
    y = tost.tssa(case.w, case.temperature, **given, backend=backend).repeat(1, times, 1, 1)
    # The 1e-8 that is added to the mass weighs less beside more tokens.
    assert_close("y", tost.tssa(w, case.temperature, **repeated, backend=backend), y, 1e-6)
    pi = tost.membership(case.w, case.temperature, **given).repeat(1, times, 1)
    assert_close("pi", tost.membership(w, case.temperature, **repeated), pi, BOUND)


# --- Padding, pieces, steps, and the future


@on_forms()
@few
@given(size=sizes, seed=seeds)
def test_mask_equals_deletion(backend, form, size, seed):
    """Whatever stands in the padding, in outputs, the state and gradients."""
    case = make(size, seed, form, state=False)
    case.mask[:, size[1] // 2] = True
    hole = ~case.mask[..., None, None]
    garbage = case.w.masked_fill(hole, float("nan")).requires_grad_()
    alone, decay = case.w.clone().requires_grad_(), case.decay
    if decay is not None and decay.dim() > 1:
        decay = decay.masked_fill(hole if decay.dim() == 4 else hole.squeeze(-1), float("nan"))
    y, state = causal(case, backend, w=garbage, decay=decay)
    whole = whole_options(case, backend=backend)
    z = tost.tssa(garbage, case.temperature, **whole)
    parts = []
    for b in range(size[0]):
        row, real = slice(b, b + 1), case.mask[b]
        given = {"w": alone[row, real], "mask": None}
        given["decay"] = case.decay if case.decay is None or case.decay.dim() == 1 else case.decay[row, real]
        own, after = causal(case, backend, **given)
        other = tost.tssa(alone[row, real], case.temperature, **whole | {"mask": None})
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


@on_forms()
@few
@given(size=sizes, seed=seeds, data=st.data())
def test_sequences_may_be_split_anywhere(backend, form, size, seed, data):
    """Into pieces of 0 and 1 tokens too; gradients flow through the state."""
    case = make(size, seed, form)
    cut = data.draw(st.integers(0, size[1]))
    cuts = sorted([cut, cut, min(cut + 1, size[1])])
    inputs = [x.requires_grad_() for x in (case.w, case.temperature, case.bias, case.decay) if x is not None]
    whole, state = causal(case, backend)
    pieces, carried = [], case.state
    for begin, end in zip([0, *cuts], [*cuts, size[1]], strict=True):
        rows = slice(begin, end)
        given = {"w": case.w[:, rows], "mask": case.mask[:, rows], "decay": part(case.decay, rows)}
        y, carried = causal(case, backend, state=carried, **given)
        pieces.append(y)
    joined = torch.cat(pieces, dim=1)
    assert_close("y", joined, whole, BOUND)
    assert_same_state(carried, state, BOUND)
    cotangents = (case.dy, *case.dstate)
    expected = torch.autograd.grad((whole, *state[:3]), inputs, cotangents)
    found = torch.autograd.grad((joined, *carried[:3]), inputs, cotangents)
    for a, b in zip(found, expected, strict=True):
        assert_close("gradient", a, b, 1e-8)


@on_forms()
def test_steps_equal_the_full_pass(backend, form):
    case = make((2, 20, 3, 6), 7, form, masked=False)
    whole, state = causal(case, backend)
    carried, steps = case.state, []
    for n in range(20):
        given = options(case, state=carried, decay=part(case.decay, n), backend=backend)
        del given["mask"]
        y, carried = tost.causal_tssa_step(case.w[:, n], case.temperature, case.bias, **given)
        steps.append(y)
    assert_close("y", torch.stack(steps, dim=1), whole, BOUND)
    assert_same_state(carried, state, BOUND)


@on_forms()
@few
@given(size=sizes, seed=seeds, data=st.data())
def test_nobody_sees_the_future(backend, form, size, seed, data):
    case = make(size, seed, form)
    cut = data.draw(st.integers(0, size[1]))
    later, decay = case.w.clone(), case.decay
    later[:, cut:] = float("inf")
    if decay is not None and decay.dim() > 1:
        decay = torch.cat((decay[:, :cut], torch.zeros_like(decay[:, cut:])), dim=1)
    changed, _ = causal(case, backend, w=later, decay=decay)
    assert torch.equal(changed[:, :cut], causal(case, backend)[0][:, :cut])


@some
@given(size=sizes, seed=seeds, form=st.sampled_from([FORMS["scaled fading"], FORMS["decays of heads"]]))
def test_states_merge_in_any_grouping_and_as_the_recurrence_does(size, seed, form):
    case = make(size, seed, form, masked=False)
    whole = causal(case, "auto")[1]
    zeros = {name: torch.zeros_like(getattr(case.state, name)) for name in ("weighted_squares", "mass")}
    piece = causal(case, "auto", state=case.state._replace(**zeros))[1]
    own = causal(case, "auto", state=None)[1]
    piece = piece._replace(squares=own.squares, position=own.position)
    decay = case.decay if case.decay.dim() == 1 else case.decay.prod(dim=1)
    assert_same_state(case.state.merge(piece, decay), whole, BOUND)
    if case.decay.dim() > 1:  # the product of all decays stands for one piece
        return
    left = case.state.merge(piece, decay).merge(whole, decay)
    assert_same_state(left, case.state.merge(piece.merge(whole, decay), decay), BOUND)
    empty = tost.TSSAState.empty(*size[:1], *size[2:], dtype=torch.float64)
    for same in (empty.merge(piece, decay), piece.merge(empty, decay)):
        assert all(map(torch.equal, same, piece))


# --- One form as another, and the equations in other words


@block_backends
@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("centered", [False, True])
def test_equal_decays_are_those_of_tokens_of_channels_and_of_nothing(backend, g, centered):
    case = make((2, 40, 3, 6), 0, {"decay": True, "block_size": g, "centered": centered, "count_scaled": True})
    y, state = causal(case, backend, state=None)
    per_token = case.decay.expand(2, 40, 3)
    for decay in (per_token, per_token.unsqueeze(-1).expand(-1, -1, -1, 6 // g)):
        z, after = causal(case, backend, state=None, decay=decay)
        assert_close("y", z, y, BOUND)
        assert_close("weighted", after.weighted_squares, state.weighted_squares, BOUND)
        assert_close("mass", after.mass.reshape(2, 3, -1)[..., 0], state.mass, BOUND)
        assert_close("squares", after.squares[..., :6], state.squares, BOUND)
    ones, plain = (causal(case, backend, decay=decay) for decay in (torch.ones(3, dtype=torch.float64), None))
    assert_close("y without decay", ones[0], plain[0], 1e-13)
    assert_same_state(ones[1], plain[1], 1e-13)


@block_backends
@few
@given(size=sizes, seed=seeds, form=st.sampled_from([FORMS["scaled fading"], FORMS["decays of channels centered"]]))
def test_sums_are_products_of_decays_times_the_tokens(backend, form, size, seed):
    """Written with one matrix of products per channel instead of a recurrence."""
    case, N = make(size, seed, form, masked=False, state=False), size[1]
    decay = case.decay.unsqueeze(-1).expand_as(case.w) if case.decay.dim() == 1 else case.decay
    products = torch.zeros(*case.w.shape[:1], N, N, *case.w.shape[2:], dtype=torch.float64)  # [B, n, m, H, D]
    for n in range(N):
        products[:, n, n] = 1
        if n > 0:
            products[:, n, :n] = products[:, n - 1, :n] * decay[:, n].unsqueeze(1)
    square, count = case.w.square(), products.sum(dim=2)
    share = count * square / torch.einsum("bnmhd,bmhd->bnhd", products, square).clamp_min(1e-12)
    pi = (case.temperature * (share.sum(dim=-1) + 6 * case.bias[:, :N].t())).softmax(dim=-1)
    mass = torch.einsum("bnmhd,bmh->bnhd", products, pi) + 1e-8
    moment = torch.einsum("bnmhd,bmh,bmhd->bnhd", products, pi, square) / mass
    mean = torch.einsum("bnmhd,bmh,bmhd->bnhd", products, pi, case.w) / mass if case.centered else 0 * moment
    y = -pi.unsqueeze(-1) * (case.w - mean) / (1 + (moment - mean.square()).clamp_min(0))
    actual, state = causal(case, backend)
    given = {name: x for name, x in options(case).items() if name not in ("block_size", "centered")}
    assert_close("pi", tost.causal_membership(case.w, case.temperature, case.bias, **given), pi, BOUND)
    expected = mass[:, -1] if case.decay.dim() == 4 else mass[:, -1, :, 0]
    assert_close("mass", state.mass, expected, 1e-7)
    assert (actual - y).abs().max() < 1e-9  # the first token is its own mean, so that y may be 0


@block_backends
@some
@given(size=sizes, seed=seeds, g=st.sampled_from([1, 2, 3, 6]))
def test_output_solves_the_equations_of_its_block(backend, size, seed, g):
    case = make(size, seed, {"count_scaled": True, "block_size": g}, masked=False)
    pi = tost.membership(case.w, case.temperature, count_scaled=True)
    y = tost.tssa(case.w, case.temperature, **whole_options(case, backend=backend))
    assert_close("rows sum to one", pi.sum(-1), torch.ones(size[:2]), BOUND)
    w, u = case.w.unflatten(-1, (-1, g)), (-y / pi.unsqueeze(-1)).unflatten(-1, (-1, g))
    moments = torch.einsum("bnh,bnhki,bnhkj->bhkij", pi, w, w) / (pi.sum(1) + 1e-8)[..., None, None, None]
    assert_close("(I + S) u = w", u + torch.einsum("bhkij,bnhkj->bnhki", moments, u), w, BOUND)
    last = tost.causal_membership(case.w, case.temperature, count_scaled=True)[:, -1]
    assert_close("pi of the last token", last, pi[:, -1], BOUND)


@on_forms(forms={name: WHOLE_FORMS[name] for name in ("plain", "blocks")})
def test_operator_is_minus_n_times_the_gradient_of_the_variational_objective(backend, form):
    """An independent derivation: autograd of the objective, orthonormal heads, W = U, memberships held fixed."""
    g = torch.Generator().manual_seed(0)
    n, d, K = 50, 24, 4
    u = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=g)).Q.reshape(d, K, d // K).transpose(0, 1)
    z = torch.randn(n, d, dtype=torch.float64, generator=g, requires_grad=True)
    w = torch.einsum("nd,kdp->nkp", z, u)
    temperature = torch.randn(K, dtype=torch.float64, generator=g)
    pi = tost.membership(w[None], temperature)[0].detach()
    (gradient,) = torch.autograd.grad(objective.variational_compression(z, pi, u, eps=d**0.5, **form), z)
    y = tost.tssa(w.detach()[None], temperature, backend=backend, **form)[0]
    # The operator adds 1e-8 to the mass of a group; the objective does not.
    assert_close("y", torch.einsum("nkp,kdp->nd", y, u), -n * gradient, 1e-8)


# --- Extreme inputs


@on_forms()
@pytest.mark.parametrize("size", [(0, 5, 2, 6), (2, 0, 2, 6), (0, 0, 1, 6), (1, 1, 1, 6)], ids=str)
def test_empty_batches_and_sequences(backend, form, size):
    case = make_case(size, torch.float32, **({"masked": True, "bias": True, "state": True} | form))
    results = run_causal(case, backend)
    for name, value in (results | run_tssa(case, backend)).items():
        assert torch.isfinite(value).all(), name
    if size[1] == 0:
        for name, d_after in zip(("squares", "weighted_squares", "mass"), case.dstate, strict=True):
            assert torch.equal(results[name], getattr(case.state, name))
            assert torch.equal(results[f"d{name}"], d_after)


@pytest.mark.parametrize("backend", FAST_BLOCK_BACKENDS)
def test_tokens_of_any_size_in_any_direction_have_bounded_outputs(backend):
    """Where rounding swallows the identity, factors without a floor would divide by nothing but rounding errors."""
    line, noise = 1e6 * torch.randn(1, 50, 2, 1) * torch.randn(1, 1, 1, 8), 1e-2 * torch.randn(1, 50, 2, 8)
    for run in (tost.tssa, tost.causal_tssa):
        y = run(line + noise, torch.ones(2), block_size=8, backend=backend)
        assert y.isfinite().all()
        assert (y.norm(dim=-1) <= 1.01 * (line + noise).norm(dim=-1)).all()
        for g in (1, 8):  # beside a large mean
            y = run(1e3 + 100 * noise, torch.ones(2), block_size=g, centered=True, backend=backend)
            assert y.isfinite().all()
            assert y.abs().max() < 10


def test_removing_a_mean_makes_centered_outputs_independent_of_it():
    case = make_case((2, 50, 3, 6), torch.float64)
    uniform = torch.zeros(3, dtype=torch.float64)  # memberships do not look at the tokens
    moved = case.w + 3 * torch.randn(2, 1, 3, 6, dtype=torch.float64)
    for g in (1, 3):
        for call in (tost.tssa, tost.causal_tssa):
            y = call(case.w, uniform, block_size=g, centered=True)
            assert (call(moved, uniform, block_size=g, centered=True) - y).abs().max() < 1e-6


def test_decays_that_forget_everything_neither_overflow_nor_lose_gradients():
    """A scan that divides by products of decays would have nothing to divide by after a few tokens."""
    w = torch.randn(1, 2000, 2, 4, requires_grad=True)
    decay = torch.rand(1, 2000, 2, 4).pow(8).requires_grad_()
    given = {"count_scaled": True, "centered": True}
    y, state = tost.causal_tssa_with_state(w, torch.ones(2), decay=decay, **given)
    y.sum().backward()
    for x in (y, *state, w.grad, decay.grad):
        assert x.isfinite().all()
    exact = tost.causal_tssa(w.detach().double(), torch.ones(2), decay=decay.detach().double(), **given)
    assert_close("y", y, exact, 1e-4)


@on_forms(backends=FAST_BACKENDS, forms={name: FORMS[name] for name in ("scaled fading", "blocks", "centered blocks")})
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_autocast_keep_statistics_in_float32(backend, form, dtype):
    case = make_case((2, 40, 3, 6), dtype, masked=True, bias=True, **form)
    expected, _ = causal(case.double(), "reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = causal(case, backend, decay=None if case.decay is None else case.decay.to(dtype))
        wide = tost.tssa(case.w.float(), case.temperature, **whole_options(case, backend=backend))
    assert (y.dtype, *(x.dtype for x in state[:3])) == (dtype, *[torch.float32] * 3)
    assert_close("y", y, expected, 2e-2)
    exact = tost.tssa(case.w.double(), case.temperature, **whole_options(case, backend="reference"))
    assert_close("in float32", wide, exact, 1e-5)


@on_forms(backends=FAST_BACKENDS, forms={name: FORMS[name] for name in ("plain", "blocks", "centered blocks")})
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run", [run_tssa, run_causal])
def test_gradients_in_half_precision_are_rounded_once(backend, form, dtype, run):
    """Not once for every statistic that they pass through: such terms may cancel."""
    case = make_case((2, 67, 3, 6), dtype, **form)
    expected = run(case.double(), "reference")["dw"]
    assert_close("dw", run(case, backend)["dw"], expected.to(dtype), 0.05 * torch.finfo(dtype).eps)
