"""Statistics in blocks of features, alone and with every other option."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.ops.cases import (
    BLOCK_BACKENDS,
    BOUNDS,
    FAST_BLOCK_BACKENDS,
    assert_all_close,
    dtype_id,
    make_case,
    run_causal,
    run_tssa,
)
from tost import objective
from tost.ops._blocks import Factors, matrices, packed_width, products
from tost.testing import assert_close

backends = pytest.mark.parametrize("backend", BLOCK_BACKENDS)
examples = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 2**31)
# Tokens, heads, blocks per head, features per block.
sizes = st.tuples(st.integers(1, 80), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
BOUND = 1e-10
EVERY_OPTION = {"masked": True, "bias": True, "state": True, "count_scaled": True, "decay": True}
# One block and several, sizes that are powers of 2 and others, tiles that are full and those that are not.
SHAPES = [
    ((1, 1, 1, 2), 2),
    ((2, 67, 3, 6), 3),
    ((5, 2, 4, 4), 4),
    ((1, 70, 3, 48), 8),
    ((2, 67, 2, 24), 8),
    ((2, 140, 3, 48), 16),
]
on_shapes = pytest.mark.parametrize(("shape", "g"), SHAPES, ids=str)


def draw(size, seed, **flags):
    N, H, blocks, g = size
    return make_case((2, N, H, blocks * g), torch.float64, block_size=g, seed=seed, **(EVERY_OPTION | flags))


def options(case, **changes):
    found = {"mask": case.mask, "state": case.state, "count_scaled": case.count_scaled, "decay": case.decay}
    return found | {"block_size": case.block_size} | changes


@on_shapes
@pytest.mark.parametrize("dtype", BOUNDS, ids=dtype_id)
def test_blocks_match_reference(shape, g, dtype):
    case = make_case(shape, dtype, block_size=g, masked=True, count_scaled=True)
    expected = run_tssa(case.double(), "reference")
    for backend in FAST_BLOCK_BACKENDS:
        assert_all_close(run_tssa(case, backend), expected, BOUNDS[dtype])
    case = make_case(shape, dtype, block_size=g, **EVERY_OPTION)
    expected = run_causal(case.double(), "reference")
    for backend in FAST_BLOCK_BACKENDS:
        assert_all_close(run_causal(case, backend), expected, BOUNDS[dtype])


@pytest.mark.parametrize(
    "flags", [(), *((x,) for x in EVERY_OPTION), *itertools.combinations(EVERY_OPTION, 2)], ids=str
)
def test_blocks_match_reference_with_any_two_options(flags):
    case = make_case((2, 70, 3, 6), torch.float64, block_size=3, **dict.fromkeys(flags, True))
    expected = run_causal(case, "reference")
    for backend in FAST_BLOCK_BACKENDS:
        assert_all_close(run_causal(case, backend), expected, 1e-11)


@pytest.mark.parametrize(("masked", "normalize", "count_scaled"), list(itertools.product((False, True), repeat=3)))
def test_whole_sequences_in_blocks_match_reference(masked, normalize, count_scaled):
    flags = {"masked": masked, "normalize": normalize, "count_scaled": count_scaled}
    case = make_case((2, 140, 3, 6), torch.float64, block_size=3, **flags)
    expected = run_tssa(case, "reference")
    for backend in FAST_BLOCK_BACKENDS:
        assert_all_close(run_tssa(case, backend), expected, 1e-11)


def test_gradient_of_the_decay_is_exact_up_to_the_size_of_its_terms():
    """Here it is a sum over the tokens in which all but a hundredth cancels, and float32 cannot do better than that."""
    case = make_case((1, 20, 1, 33), torch.float32, decay=True, block_size=11)
    exact, state, outputs = case.double(), None, []
    decays = [exact.decay.clone().requires_grad_() for _ in range(20)]
    for n, decay in enumerate(decays):
        w, form = exact.w[:, n : n + 1], {"decay": decay, "block_size": 11, "backend": "reference"}
        y, state = tost.causal_tssa_with_state(w, exact.temperature, state=state, **form)
        outputs.append(y)
    terms = torch.stack(torch.autograd.grad((torch.cat(outputs, 1), *state[:3]), decays, (exact.dy, *exact.dstate)))
    assert terms.abs().sum() > 100 * terms.sum().abs()
    for backend in FAST_BLOCK_BACKENDS:
        error = run_causal(case, backend)["ddecay"].double() - terms.sum(dim=0)
        assert error.abs() < 5e-6 * terms.abs().sum(), backend


@pytest.mark.parametrize("isa", tost.ops._library.compiled_isas())
@pytest.mark.parametrize("g", [2, 4, 8, 16])
def test_blocks_agree_on_every_instruction_set(isa, g):
    try:
        tost.ops.select_isa(isa)
    except tost.errors.ConfigError as error:
        pytest.skip(str(error))
    try:
        case = make_case((1, 66, 5, 3 * g), torch.float32, block_size=g, **EVERY_OPTION)
        assert_all_close(run_causal(case, "native"), run_causal(case.double(), "torch"), 2e-5)
        assert_all_close(run_tssa(case, "native"), run_tssa(case.double(), "torch"), 2e-5)
    finally:
        tost.ops.select_isa("auto")


@backends
def test_blocks_of_one_are_the_plain_form_to_the_last_bit(backend):
    case = make_case((2, 70, 3, 6), torch.float32, **EVERY_OPTION)
    arguments = options(case, backend=backend)
    plain = {name: value for name, value in arguments.items() if name != "block_size"}
    y, state = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **arguments)
    z, other = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **plain)
    assert torch.equal(y, z)
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


@backends
@examples
@given(size=sizes, seed=seeds)
def test_output_solves_the_equations_of_its_block(backend, size, seed):
    case = draw(size, seed, masked=False)
    g = case.block_size
    pi = tost.membership(case.w, case.temperature, count_scaled=True)
    y = tost.tssa(case.w, case.temperature, count_scaled=True, block_size=g, backend=backend)
    w, u = case.w.unflatten(-1, (-1, g)), (-y / pi.unsqueeze(-1)).unflatten(-1, (-1, g))
    moments = torch.einsum("bnh,bnhki,bnhkj->bhkij", pi, w, w) / (pi.sum(1) + 1e-8)[..., None, None, None]
    assert_close("(I + S) u = w", u + torch.einsum("bhkij,bnhkj->bnhki", moments, u), w, 1e-9)


@backends
def test_operator_is_minus_n_times_the_gradient_of_the_block_objective(backend):
    """An independent derivation, as in test_properties.py: autograd of the objective, memberships held fixed."""
    generator = torch.Generator().manual_seed(0)
    n, d, K, g = 50, 24, 4, 3
    u = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator)).Q
    u = u.reshape(d, K, d // K).transpose(0, 1)
    z = torch.randn(n, d, dtype=torch.float64, generator=generator, requires_grad=True)
    w = torch.einsum("nd,kdp->nkp", z, u)
    temperature = torch.randn(K, dtype=torch.float64, generator=generator)
    pi = tost.membership(w[None], temperature)[0].detach()
    value = objective.variational_compression(z, pi, u, eps=d**0.5, block_size=g)
    (gradient,) = torch.autograd.grad(value, z)
    y = tost.tssa(w.detach()[None], temperature, block_size=g, backend=backend)[0]
    assert_close("y", torch.einsum("nkp,kdp->nd", y, u), -n * gradient, 1e-8)


@backends
@examples
@given(size=sizes, seed=seeds, data=st.data())
def test_blocks_and_heads_are_alike_and_nobody_sees_the_future(backend, size, seed, data):
    case = draw(size, seed, state=False)
    (N, H, blocks, g), random = size, torch.Generator().manual_seed(seed)
    heads = torch.randperm(H, generator=random)
    within = torch.cat([b * g + torch.randperm(g, generator=random) for b in torch.randperm(blocks, generator=random)])
    cut = data.draw(st.integers(0, N))

    def run(w, t, bias, decay):
        return tost.causal_tssa(w, t, bias, **options_without_state(case, decay), backend=backend)

    y = run(case.w, case.temperature, case.bias, case.decay)
    permuted = run(case.w[:, :, heads], case.temperature[heads], case.bias[heads], case.decay[heads])
    assert_close("heads", permuted, y[:, :, heads], BOUND)
    assert_close("blocks", run(case.w[..., within], case.temperature, case.bias, case.decay), y[..., within], BOUND)
    changed = torch.cat((case.w[:, :cut], torch.full_like(case.w[:, cut:], float("inf"))), dim=1)
    assert torch.equal(run(changed, case.temperature, case.bias, case.decay)[:, :cut], y[:, :cut])


def options_without_state(case, decay):
    return {"mask": case.mask, "count_scaled": True, "decay": decay, "block_size": case.block_size}


def test_blocks_stay_accurate_over_many_tokens():
    case = make_case((1, 16_384, 1, 8), torch.float32, block_size=4, bias=True)
    expected = run_causal(case.double(), "torch")
    whole = run_tssa(case.double(), "torch")
    for backend in FAST_BLOCK_BACKENDS:
        actual = run_causal(case, backend)
        for name in ("y", "squares", "weighted_squares", "mass", "dw"):
            assert_close(f"{name} of {backend}", actual[name], expected[name], 1e-5)
        actual = run_tssa(case, backend)
        for name in ("y", "dw"):
            assert_close(f"{name} of {backend}", actual[name], whole[name], 1e-5)


@pytest.mark.parametrize("backend", FAST_BLOCK_BACKENDS)
def test_tokens_of_any_size_in_any_direction_have_bounded_outputs(backend):
    """Where rounding swallows the identity, factors without a floor would divide by nothing but rounding errors."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1, 1, 1, 8, generator=generator)
    w = 1e6 * torch.randn(1, 50, 2, 1, generator=generator) * direction + 1e-2 * torch.randn(
        1, 50, 2, 8, generator=generator
    )
    for y in (
        tost.tssa(w, torch.ones(2), block_size=8, backend=backend),
        tost.causal_tssa(w, torch.ones(2), block_size=8, backend=backend),
    ):
        assert y.isfinite().all()
        assert (y.norm(dim=-1) <= 1.01 * w.norm(dim=-1)).all()


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.slow) if name == "torch" else name for name in FAST_BLOCK_BACKENDS],
)
def test_blocks_compile_without_a_graph_break(backend):
    case = make_case((2, 5, 2, 4), torch.float32, block_size=2, **EVERY_OPTION)

    def step(w, t, decay):
        y, after = tost.causal_tssa_with_state(w, t, case.bias, **options(case, decay=decay, backend=backend))
        return y + tost.tssa(w, t, mask=case.mask, block_size=4, backend=backend), after.mass

    inputs = tuple(x.clone().requires_grad_() for x in (case.w, case.temperature, case.decay))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
    eager = step(*inputs)
    assert_close("y", compiled[0], eager[0], 1e-6)
    found, expected = (torch.autograd.grad(each, inputs, (case.dy, case.dstate[2])) for each in (compiled, eager))
    for name, a, b in zip(("dw", "dtemperature", "ddecay"), found, expected, strict=True):
        assert_close(name, a, b, 1e-5)


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_autocast_leaves_the_statistics_of_blocks_alone(backend, dtype):
    case = make_case((2, 40, 3, 6), torch.float32, masked=True, bias=True, block_size=3)
    half = case.w.to(dtype)
    arguments = (case.temperature, case.bias)
    expected = tost.causal_tssa(half.double(), *arguments, mask=case.mask, block_size=3, backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = tost.causal_tssa_with_state(half, *arguments, mask=case.mask, block_size=3, backend=backend)
        wide = tost.tssa(case.w, case.temperature, block_size=3, backend=backend)
    assert (y.dtype, state.weighted_squares.dtype) == (dtype, torch.float32)
    assert_close("y", y, expected, 1e-2)
    plain = tost.tssa(case.w.double(), case.temperature, block_size=3, backend="reference")
    assert_close("in float32", wide, plain, 1e-5)


@backends
@pytest.mark.parametrize("size", [(0, 5, 2, 4), (2, 0, 2, 4)], ids=str)
def test_blocks_take_empty_batches_and_sequences(backend, size):
    case = make_case(size, torch.float32, block_size=2, **EVERY_OPTION)
    results = run_causal(case, backend)
    for name, value in results.items():
        assert torch.isfinite(value).all(), name
    if size[1] == 0:
        assert torch.equal(results["weighted_squares"], case.state.weighted_squares)
        assert torch.equal(results["dweighted_squares"], case.dstate[1])
    assert run_tssa(case, backend)["y"].shape == case.w.shape


@pytest.mark.parametrize(("D", "g"), [(4, 1), (4, 2), (6, 3), (8, 8)])
def test_packed_products_begin_with_the_squares_and_make_symmetric_matrices(D, g):
    v = torch.randn(3, D, dtype=torch.float64)
    packed, blocks = products(v, g), v.unflatten(-1, (-1, g))
    assert packed.shape == (3, packed_width(D, g))
    assert torch.equal(packed[:, :D], v.square())
    found = matrices(packed, D, g)
    assert torch.equal(found, blocks.unsqueeze(-1) * blocks.unsqueeze(-2))
    solved = Factors(found).solve(blocks)
    assert_close("solution", solved + (found @ solved.unsqueeze(-1)).squeeze(-1), blocks, 1e-12)


@pytest.mark.parametrize("g", [0, -1, 3, 8])
def test_blocks_that_do_not_divide_the_head_are_refused(g):
    w, t = torch.randn(2, 5, 3, 4), torch.ones(3)
    message = rf"block_size is {g}, but the heads of w have 4 features.*divides 4"
    for call in (tost.tssa, tost.causal_tssa, tost.causal_tssa_with_state):
        with pytest.raises(ValueError, match=message):
            call(w, t, block_size=g)


def test_state_of_other_blocks_is_refused():
    w, t = torch.randn(2, 5, 3, 4), torch.ones(3)
    with pytest.raises(ValueError, match=r"weighted_squares has shape \(2, 3, 4\).*needs \(2, 3, 6\).*block_size=2"):
        tost.causal_tssa_with_state(w, t, state=tost.TSSAState.empty(2, 3, 4), block_size=2)
    with pytest.raises(ValueError, match=r"weighted_squares has shape \(2, 3, 6\).*needs \(2, 3, 4\)"):
        tost.causal_tssa_with_state(w, t, state=tost.TSSAState.empty(2, 3, 4, block_size=2))
