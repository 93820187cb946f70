"""Every backend against the reference in float64, in every form: outputs, state and every gradient."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch

import tost
from tests.ops.cases import (
    BACKENDS,
    BOUNDS,
    FAST_BACKENDS,
    FAST_BLOCK_BACKENDS,
    FORMS,
    SHAPES,
    WHOLE_FORMS,
    assert_all_close,
    causal,
    dtype_id,
    make_case,
    on_forms,
    options,
    run_causal,
    run_tssa,
    shape_id,
    whole_options,
)
from tost.ops._blocks import Factors, matrices, packed_width, products
from tost.ops._count import effective_count
from tost.ops._dispatch import select
from tost.ops._inputs import causal_form
from tost.ops._library import compiled_isas
from tost.testing import assert_close

EVERY = {"masked": True, "bias": True, "state": True}
ALL = EVERY | {"count_scaled": True, "decay": True}
fast_backends = pytest.mark.parametrize("backend", FAST_BACKENDS)
dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=dtype_id)
# One block and several, sizes that are powers of 2 and others, tiles that are full and those that are not.
BLOCK_SHAPES = [
    ((1, 1, 1, 2), 2),
    ((5, 2, 4, 4), 4),
    ((1, 70, 3, 48), 8),
    ((2, 67, 2, 24), 8),
    ((2, 140, 3, 48), 16),
]


def compare(case, backend, runs=(run_tssa, run_causal), bound=None, against="reference"):
    for run in runs:
        assert_all_close(run(case, backend), run(case.double(), against), bound or BOUNDS[case.w.dtype])


@fast_backends
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize(("masked", "normalize"), list(product((False, True), repeat=2)))
def test_tssa_matches_reference(backend, shape, dtype, masked, normalize):
    compare(make_case(shape, dtype, masked=masked, normalize=normalize), backend, [run_tssa])


@fast_backends
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize(("masked", "bias", "state"), [(0, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_causal_tssa_matches_reference(backend, shape, dtype, masked, bias, state):
    compare(make_case(shape, dtype, masked=bool(masked), bias=bool(bias), state=bool(state)), backend, [run_causal])


@on_forms(FAST_BACKENDS)
@dtypes
@pytest.mark.parametrize("flags", [{}, EVERY], ids=["alone", "every"])
def test_forms_match_reference(backend, form, dtype, flags):
    # A product of decays that differ by orders of magnitude has a gradient that cancels.
    bound = BOUNDS[dtype] * (10 if dtype == torch.float32 else 2)
    # The reference forgets token by token, so these are few shapes.
    for shape in ((2, 67, 3, 6), (1, 2, 1, 6)):
        compare(make_case(shape, dtype, **form, **flags), backend, [run_causal], bound)


@on_forms(FAST_BACKENDS, WHOLE_FORMS)
@dtypes
@pytest.mark.parametrize(("masked", "normalize"), list(product((False, True), repeat=2)))
def test_forms_of_tssa_match_reference(backend, form, dtype, masked, normalize):
    case = make_case((2, 140, 3, 6), dtype, masked=masked, normalize=normalize, **form)
    compare(case, backend, [run_tssa], 2 * BOUNDS[dtype])


@dtypes
@pytest.mark.parametrize("backend", FAST_BLOCK_BACKENDS)
@pytest.mark.parametrize(("shape", "g"), BLOCK_SHAPES, ids=str)
def test_blocks_match_reference(backend, shape, g, dtype):
    compare(make_case(shape, dtype, block_size=g, **ALL), backend)


# Several chunks; heads that fill tiles, that share one, and that end within one; widths and blocks that are constants.
TILES = [
    *[((1, 70, 2, width), 1) for width in (32, 48, 64)],
    *[((2, 200, 2, 16), 1), ((1, 150, 3, 5), 1), ((1, 140, 2, 64), 8), ((1, 140, 3, 24), 8)],
]


@pytest.mark.parametrize(("shape", "g"), TILES, ids=str)
@pytest.mark.parametrize("decay", [False, True, "head", "channel"])
@pytest.mark.parametrize("centered", [False, True])
def test_native_tiles_match_the_torch_backend(shape, g, decay, centered):
    form = EVERY | {"count_scaled": True, "block_size": g, "decay": decay, "centered": centered}
    compare(make_case(shape, torch.float64, **form), "native", bound=1e-9, against="torch")
    single = make_case(shape, torch.float32, **form)
    found, expected = run_causal(single, "native"), run_causal(single.double(), "torch")
    for name in {"y", "dw", "ddecay", "squares", "weighted_squares", "mass"} & expected.keys():
        assert_close(name, found[name], expected[name], 2e-4)
    compare(single, "native", [run_tssa], 2e-4, "torch")


ISA_FORMS = [
    *[(EVERY, (2, 131, 3, 19)), (ALL, (2, 131, 5, 19))],
    *[(ALL | {"block_size": g}, (1, 66, 5, 3 * g)) for g in (2, 4, 8, 16)],
    *[
        (EVERY | {"count_scaled": True, "decay": decay, "block_size": g, "centered": centered}, (2, 70, 3, 12))
        for decay, g, centered in [("head", 1, False), ("channel", 1, True), ("channel", 6, True), ("head", 3, True)]
    ],
]


@dtypes
@pytest.mark.parametrize("isa", compiled_isas())
def test_native_kernels_agree_on_every_instruction_set(isa, dtype):
    try:
        tost.ops.select_isa(isa)
    except tost.errors.ConfigError as error:
        pytest.skip(str(error))
    try:
        for form, shape in ISA_FORMS:
            bound = BOUNDS[dtype] * (20 if isinstance(form.get("decay"), str) and dtype != torch.bfloat16 else 1)
            compare(make_case(shape, dtype, **form), "native", bound=bound, against="torch")
    finally:
        tost.ops.select_isa("auto")


@pytest.mark.parametrize("backend", FAST_BACKENDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=dtype_id)
def test_results_stay_accurate_over_65536_tokens(backend, dtype, bound):
    names = ("y", "squares", "weighted_squares", "mass", "dw", "ddecay")
    forms = [((1, 65_536, 2, 8), {"bias": True})]
    if dtype == torch.float32 and backend in FAST_BLOCK_BACKENDS:
        # Against the PyTorch version: the reference walks token by token.
        forms += [((1, 65_536, 2, 2), {"bias": True, "count_scaled": True, "decay": True})]
        forms += [((1, 16_384, 1, 8), {"bias": True, "block_size": 4})]
    for shape, form in forms:
        case = make_case(shape, dtype, **form)
        if case.decay is not None:
            case = replace(case, decay=torch.tensor([0.9, 1 - 1e-5]))
        for run in (run_tssa, run_causal):
            actual, expected = run(case, backend), run(case.double(), "torch" if len(form) > 1 else "reference")
            for name in names:
                if name in actual:
                    assert_close(name, actual[name], expected[name], bound)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_native_results_do_not_depend_on_the_number_of_threads(form):
    case = make_case((2, 1500, 4, 12), torch.float32, **EVERY | form)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([*run_tssa(case, "native").values(), *run_causal(case, "native").values()])
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


@on_forms()
def test_overwriting_gives_the_same_numbers(backend, form):
    case = make_case((2, 70, 3, 6), torch.float64, **EVERY | form)
    whole = whole_options(case, backend=backend)
    with torch.no_grad():
        y, (z, after) = tost.tssa(case.w, case.temperature, **whole), causal(case, backend)
        for copy in (torch.clone, lambda w: w.transpose(1, 2).contiguous().transpose(1, 2)):
            w, v = copy(case.w), copy(case.w)
            found = tost.tssa(w, case.temperature, **whole, overwrite=True)
            other, state = causal(case, backend, w=v, overwrite=True)
            for given, result, expected in ((w, found, y), (v, other, z)):
                assert (result.data_ptr() == given.data_ptr()) == (backend == "native" and given.is_contiguous())
                assert_close("y", result, expected, 1e-12)
            assert all(map(torch.equal, state, after))


@on_forms()
def test_gradcheck(backend, form):
    case = make_case((2, 4, 2, 6), torch.float64, seed=1, **EVERY | form)
    decay = None if case.decay is None else (0.2 + 0.7 * case.decay)  # away from the ends of what is allowed
    given = (case.w, case.temperature, case.bias, *case.state[:3], *([] if decay is None else [decay]))
    given = tuple(x.detach().requires_grad_() for x in given)

    def call(w, t, bias, squares, weighted, mass, decay=None):
        state = tost.TSSAState(squares, weighted, mass, case.state.position)
        y, after = causal(case, backend, w=w, temperature=t, bias=bias, state=state, decay=decay)
        return (y, *after[:3])

    assert torch.autograd.gradcheck(call, given, fast_mode=True)
    if case.block_size < 3 and backend == "torch":  # a second derivative of factors takes seconds
        assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@on_forms(forms=WHOLE_FORMS)
@pytest.mark.parametrize("normalize", [True, False])
def test_tssa_gradcheck(backend, form, normalize):
    case = make_case((2, 5, 2, 6), torch.float64, masked=True, normalize=normalize, **form)
    given = (case.w.requires_grad_(), case.temperature.requires_grad_())

    def call(w, t):
        return tost.tssa(w, t, **whole_options(case, backend=backend))

    assert torch.autograd.gradcheck(call, given, fast_mode=True)
    if normalize and backend == "torch":
        assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


def test_gradient_of_the_decay_is_exact_up_to_the_size_of_its_terms():
    """Here it is a sum over the tokens in which all but a hundredth cancels, and float32 cannot do better than that."""
    case = make_case((1, 20, 1, 33), torch.float32, decay=True, block_size=11)
    exact, state, outputs = case.double(), None, []
    decays = [exact.decay.clone().requires_grad_() for _ in range(20)]
    for n, decay in enumerate(decays):
        y, state = causal(exact, "reference", w=exact.w[:, n : n + 1], decay=decay, state=state)
        outputs.append(y)
    terms = torch.stack(torch.autograd.grad((torch.cat(outputs, 1), *state[:3]), decays, (exact.dy, *exact.dstate)))
    assert terms.abs().sum() > 100 * terms.sum().abs()
    for backend in FAST_BLOCK_BACKENDS:
        error = run_causal(case, backend)["ddecay"].double() - terms.sum(dim=0)
        assert error.abs() < 5e-6 * terms.abs().sum(), backend


# The compiler takes seconds for the formulas.
@pytest.mark.parametrize(
    ("backend", "form"),
    [
        *[(name, {}) for name in BACKENDS if name != "reference"],
        ("native", {"block_size": 3}),
        pytest.param("torch", {"block_size": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_options_compile_without_a_graph_break(backend, form, compiler):
    case = make_case((2, 18 if backend != "torch" else 3, 2, 6), torch.float32, **ALL | form)

    def step(w, t, decay, position):
        state = case.state._replace(position=position)
        y, after = causal(case, backend, w=w, temperature=t, decay=decay, state=state)
        return y + tost.tssa(w, t, **whole_options(case, backend=backend)), *after

    given = tuple(None if x is None else x.clone().requires_grad_() for x in (case.w, case.temperature, case.decay))
    inputs = [x for x in given if x is not None]
    compiled = torch.compile(step, fullgraph=True, backend=compiler)(*given, case.state.position)
    eager = step(*given, case.state.position)
    for a, b in zip(compiled, eager, strict=True):
        assert_close("output", a, b, 1e-6)
    cotangents = (case.dy, *case.dstate)
    found, expected = (torch.autograd.grad(each[:4], inputs, cotangents) for each in (compiled, eager))
    for a, b in zip(found, expected, strict=True):
        assert_close("gradient", a, b, 1e-5)


@pytest.mark.parametrize("backend", FAST_BLOCK_BACKENDS)
@pytest.mark.parametrize("decay", ["head", True])
def test_calls_with_options_can_be_mapped_over(backend, decay):
    case = make_case((3, 9, 2, 6), torch.float64, decay=decay, centered=True)

    def run(w, decay):
        return causal(case, backend, w=w.unsqueeze(0), decay=decay)[0][0]

    each = case.decay.unsqueeze(1) if decay == "head" else case.decay
    mapped = torch.vmap(run, in_dims=(0, 0 if decay == "head" else None))(case.w, each)
    assert_close("y", mapped, causal(case, backend)[0], 1e-9)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_fastest_backend_takes_every_form(form):
    case = make_case((1, 4, 2, 6), torch.float32, **form)
    given = options(case)
    chosen = causal_form(case.decay, **{name: given[name] for name in ("count_scaled", "block_size", "centered")})
    assert select("causal_tssa", "auto", case.w, chosen).backend.name == FAST_BLOCK_BACKENDS[0]


# --- What the formulas are made of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [1e-30, 1e-3, 0.3, 0.5, 0.9, 0.999, 1 - 1e-5, 1 - 2**-24, 1.0])
def test_effective_count_and_its_slope_are_accurate_up_to_one(dtype, decay):
    a = torch.tensor([decay], dtype=dtype, requires_grad=True)
    exact = Fraction(a.item())
    for t in (1, 2, 3, 17, 200):
        count = effective_count(a, torch.tensor([t]))
        (slope,) = torch.autograd.grad(count, a)
        terms = [exact**k for k in range(t)]
        wanted = sum(k * terms[k - 1] for k in range(1, t))
        bound = 1e-6 if dtype == torch.float32 else 1e-14
        assert abs(count.item() / sum(terms) - 1) < bound
        assert abs(slope.item() - wanted) <= bound * max(wanted, 1)
    long = effective_count(a, torch.tensor([10**6])).item()
    assert long == pytest.approx(10**6 if decay == 1 else min(10**6, float(1 / (1 - exact))), rel=0.6)
    a = torch.tensor([0.2, 0.5, 0.7, 0.97, 1 - 1e-9], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[1, 2, 7], [30, 60, 3]])
    assert torch.autograd.gradgradcheck(lambda a: effective_count(a, t), (a,))


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
