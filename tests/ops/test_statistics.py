"""Statistics that carry content: moments about means, and decays that come from the data."""

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
    make_case,
    run_causal,
    run_tssa,
)
from tost.errors import ConfigError
from tost.ops._dispatch import select
from tost.ops._inputs import causal_form
from tost.ops._library import compiled_isas
from tost.ops.form import Form
from tost.testing import assert_close

# The others refuse these options, as they do blocks.
backends = pytest.mark.parametrize("backend", BLOCK_BACKENDS)
fast_backends = pytest.mark.parametrize("backend", FAST_BLOCK_BACKENDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
EVERY_OPTION = {"masked": True, "bias": True, "state": True, "count_scaled": True}
BOUND = 1e-9
# Each option beside each other one.
FORMS = [
    {"decay": True},
    {"decay": True, "block_size": 3},
    {"decay": "head"},
    {"decay": "channel"},
    {"decay": "head", "block_size": 3, "centered": True},
    {"decay": "channel", "block_size": 2},
    {"decay": "channel", "block_size": 6, "centered": True},
    {"decay": "channel", "centered": True},
    {"decay": True, "centered": True},
    {"decay": False, "block_size": 3, "centered": True},
    {"decay": False, "centered": True},
]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(f"{k}={v}" for k, v in form.items()))
sizes = st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 3), st.just(6))
seeds = st.integers(0, 2**31)
few = settings(max_examples=3, deadline=None)


def options(case, **changed):
    names = ("mask", "state", "count_scaled", "decay", "block_size", "centered")
    return {name: getattr(case, name) for name in names} | changed


def make(size, seed, form, **flags):
    return make_case(size, torch.float64, seed=seed, **(EVERY_OPTION | form | flags))


def rows(x, part):
    """What tokens have, [B, N, ...], of some of them; what all share as it is."""
    return x if x is None or x.dim() == 1 else x[:, part]


def assert_same_state(actual, expected, bound=BOUND):
    for name, a, b in zip(expected._fields, actual, expected, strict=True):
        assert_close(name, a, b, bound)


@fast_backends
@forms
@dtypes
@pytest.mark.parametrize("flags", [{}, EVERY_OPTION], ids=["plain", "every option"])
def test_causal_matches_reference(backend, form, dtype, flags):
    for shape in ((2, 67, 3, 6), (1, 2, 1, 6)):
        case = make_case(shape, dtype, **form, **({"state": True} | flags))
        # A product of decays that differ by orders of magnitude has a gradient that cancels.
        bound = BOUNDS[dtype] * (10 if dtype == torch.float32 else 1)
        assert_all_close(run_causal(case, backend), run_causal(case.double(), "reference"), bound)


@fast_backends
@dtypes
@pytest.mark.parametrize("g", [1, 2, 6])
@pytest.mark.parametrize("flags", [{}, {"masked": True, "count_scaled": True}, {"normalize": False}], ids=str)
def test_centered_tssa_matches_reference(backend, dtype, g, flags):
    case = make_case((2, 67, 3, 6), dtype, block_size=g, centered=True, **flags)
    assert_all_close(run_tssa(case, backend), run_tssa(case.double(), "reference"), 2 * BOUNDS[dtype])


# Several chunks; heads that fill tiles, that share one, and that end within one; a size of blocks that is a constant.
@pytest.mark.parametrize(
    ("shape", "g"), [((2, 200, 2, 16), 1), ((1, 150, 3, 5), 1), ((1, 140, 2, 64), 8), ((1, 140, 3, 24), 8)], ids=str
)
@pytest.mark.parametrize("decay", [False, True, "head", "channel"])
@pytest.mark.parametrize("centered", [False, True])
def test_native_tiles_match_the_torch_backend(shape, g, decay, centered):
    case = make_case(shape, torch.float64, block_size=g, decay=decay, centered=centered, **EVERY_OPTION)
    assert_all_close(run_causal(case, "native"), run_causal(case, "torch"), 1e-9)
    single = make_case(shape, torch.float32, block_size=g, decay=decay, centered=centered, **EVERY_OPTION)
    found, expected = run_causal(single, "native"), run_causal(case, "torch")
    for name in ("y", "dw", "ddecay", "squares", "weighted_squares", "mass"):
        if name in expected:
            assert_close(name, found[name], expected[name], 2e-4)
    if centered and not decay:
        assert_all_close(run_tssa(case, "native"), run_tssa(case, "torch"), 1e-9)
        assert_close("y", run_tssa(single, "native")["y"], run_tssa(case, "torch")["y"], 1e-5)


@pytest.mark.parametrize("isa", compiled_isas())
def test_every_instruction_set(isa):
    try:
        tost.ops.select_isa(isa)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        for form in FORMS[2:7]:
            case = make_case((2, 70, 3, 12), torch.float32, **(EVERY_OPTION | form))
            exact = case.double()
            assert_close("y", run_causal(case, "native")["y"], run_causal(exact, "torch")["y"], 1e-4)
            assert_close("dw", run_causal(case, "native")["dw"], run_causal(exact, "torch")["dw"], 1e-3)
        assert_close("y", run_tssa(case, "native")["y"], run_tssa(exact, "torch")["y"], 1e-5)
    finally:
        tost.ops.select_isa("auto")


@pytest.mark.parametrize("g", [1, 3])
@pytest.mark.parametrize("causal", [False, True], ids=["tssa", "causal"])
def test_native_results_do_not_depend_on_the_number_of_threads(causal, g):
    form = {"decay": "channel", **EVERY_OPTION} if causal else {"masked": True}
    case = make_case((2, 1500, 4, 24), torch.float32, block_size=g, centered=True, **form)
    run, before, results = run_causal if causal else run_tssa, torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(case, "native"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@forms
def test_native_overwrites_its_input_where_it_may(form):
    case = make((2, 80, 3, 6), 4, form)
    with torch.no_grad():
        given = options(case, backend="native")
        y, state = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **given)
        w = case.w.clone()
        z, after = tost.causal_tssa_with_state(w, case.temperature, case.bias, **given, overwrite=True)
        assert z.data_ptr() == w.data_ptr()
        assert torch.equal(w, y)
        assert all(map(torch.equal, after, state))
        both = {"mask": case.mask, "block_size": case.block_size, "centered": case.centered, "backend": "native"}
        y = tost.tssa(case.w, case.temperature, **both)
        assert torch.equal(tost.tssa(case.w.clone(), case.temperature, **both, overwrite=True), y)


@pytest.mark.parametrize("decay", ["head", True])
def test_native_calls_can_be_mapped_over(decay):
    case = make((3, 9, 2, 6), 2, {"decay": decay, "centered": True}, masked=False, state=False)

    def run(w, decay):
        return tost.causal_tssa(w.unsqueeze(0), case.temperature, decay=decay, centered=True, backend="native")[0]

    each = case.decay.unsqueeze(1) if decay == "head" else case.decay
    mapped = torch.vmap(run, in_dims=(0, 0 if decay == "head" else None))(case.w, each)
    whole = tost.causal_tssa(case.w, case.temperature, decay=case.decay, centered=True, backend="native")
    assert_close("y", mapped, whole, BOUND)


@backends
@forms
def test_equal_decays_of_tokens_are_those_of_heads(backend, form):
    case = make((2, 40, 3, 6), 0, form, decay=True)
    arguments = (case.w, case.temperature, case.bias)
    y, state = tost.causal_tssa_with_state(*arguments, **options(case, state=None), backend=backend)
    shared = case.decay.expand(2, 40, 3)
    shared = shared.unsqueeze(-1).expand(-1, -1, -1, 6 // case.block_size) if form["decay"] == "channel" else shared
    z, after = tost.causal_tssa_with_state(*arguments, **options(case, state=None, decay=shared), backend=backend)
    assert_close("y", z, y, BOUND)
    assert_close("weighted", after.weighted_squares, state.weighted_squares, BOUND)
    assert_close("mass", after.mass.reshape(2, 3, -1)[..., 0], state.mass, BOUND)
    assert_close("squares", after.squares[..., :6], state.squares, BOUND)


@backends
@few
@given(size=sizes, seed=seeds)
def test_channels_forget_and_are_weighed_alone(backend, size, seed):
    """Written with one matrix of products per channel instead of a recurrence."""
    case = make(size, seed, {"decay": "channel", "centered": True}, masked=False, state=False)
    N = size[1]
    products = torch.zeros(*case.w.shape[:1], N, N, *case.w.shape[2:], dtype=torch.float64)  # [B, n, m, H, D]
    for n in range(N):
        products[:, n, n] = 1
        if n > 0:
            products[:, n, :n] = products[:, n - 1, :n] * case.decay[:, n].unsqueeze(1)
    square, count = case.w.square(), products.sum(dim=2)
    share = count * square / torch.einsum("bnmhd,bmhd->bnhd", products, square).clamp_min(1e-12)
    energy = share.sum(dim=-1) + 6 * case.bias[:, :N].t()
    pi = (case.temperature * energy).softmax(dim=-1)
    mass = torch.einsum("bnmhd,bmh->bnhd", products, pi) + 1e-8
    mean = torch.einsum("bnmhd,bmh,bmhd->bnhd", products, pi, case.w) / mass
    moment = torch.einsum("bnmhd,bmh,bmhd->bnhd", products, pi, square) / mass
    y = -pi.unsqueeze(-1) * (case.w - mean) / (1 + (moment - mean.square()).clamp_min(0))
    arguments = (case.w, case.temperature, case.bias)
    actual, state = tost.causal_tssa_with_state(*arguments, **options(case), backend=backend)
    given = {name: x for name, x in options(case).items() if name not in ("block_size", "centered")}
    assert_close("pi", tost.causal_membership(*arguments, **given), pi, BOUND)
    assert_close("mass", state.mass, mass[:, -1], 1e-7)
    assert_close("count", state.squares[..., 6:], count[:, -1], BOUND)
    assert (actual - y).abs().max() < 1e-9  # the first token is its own mean, so that y may be 0


@backends
@forms
@few
@given(size=sizes, seed=seeds, data=st.data())
def test_sequences_may_be_split_anywhere(backend, form, size, seed, data):
    case = make(size, seed, form)
    cut = data.draw(st.integers(0, size[1]))
    inputs = [x.requires_grad_() for x in (case.w, case.temperature, *([] if case.decay is None else [case.decay]))]
    given = options(case, backend=backend)
    whole, state = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **given)
    pieces, carried = [], case.state
    for part in (slice(0, cut), slice(cut, None)):
        here = given | {"mask": case.mask[:, part], "state": carried, "decay": rows(case.decay, part)}
        y, carried = tost.causal_tssa_with_state(case.w[:, part], case.temperature, case.bias, **here)
        pieces.append(y)
    joined = torch.cat(pieces, dim=1)
    assert_close("y", joined, whole, BOUND)
    assert_same_state(carried, state)
    cotangents = (case.dy, *case.dstate)
    expected = torch.autograd.grad((whole, *state[:3]), inputs, cotangents)
    found = torch.autograd.grad((joined, *carried[:3]), inputs, cotangents)
    for a, b in zip(found, expected, strict=True):
        assert_close("gradient", a, b, 1e-8)


@backends
@forms
def test_steps_equal_the_full_pass(backend, form):
    case = make((2, 20, 3, 6), 7, form, masked=False)
    whole, state = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **options(case), backend=backend)
    carried, steps = case.state, []
    for n in range(20):
        decay = case.decay if case.decay is None or case.decay.dim() == 1 else case.decay[:, n]
        given = options(case, state=carried, decay=decay, backend=backend)
        del given["mask"]
        y, carried = tost.causal_tssa_step(case.w[:, n], case.temperature, case.bias, **given)
        steps.append(y)
    assert_close("y", torch.stack(steps, dim=1), whole, BOUND)
    assert_same_state(carried, state)


@backends
@forms
@few
@given(size=sizes, seed=seeds)
def test_mask_equals_deletion(backend, form, size, seed):
    case = make(size, seed, form, state=False)
    case.mask[:, size[1] // 2] = True
    hole = ~case.mask[..., None, None]
    garbage = case.w.masked_fill(hole, float("nan"))
    decay = case.decay
    if decay is not None and decay.dim() > 1:
        decay = decay.masked_fill(hole if decay.dim() == 4 else hole.squeeze(-1), float("nan"))
    given = options(case, decay=decay, backend=backend)
    y, state = tost.causal_tssa_with_state(garbage, case.temperature, case.bias, **given)
    form = {"block_size": case.block_size, "centered": case.centered, "backend": backend}
    both = tost.tssa(garbage, case.temperature, mask=case.mask, **form)
    assert not y[~case.mask].any()
    assert not both[~case.mask].any()
    for b in range(size[0]):
        real, alone = case.mask[b], case.w[b : b + 1, case.mask[b]]
        own = case.decay if case.decay is None or case.decay.dim() == 1 else case.decay[b : b + 1, real]
        z, after = tost.causal_tssa_with_state(
            alone, case.temperature, case.bias, **(given | {"mask": None, "decay": own})
        )
        assert (y[b : b + 1, real] - z).abs().max() < BOUND
        assert_same_state(tost.TSSAState(*(x[b : b + 1] for x in state)), after)
        assert (both[b : b + 1, real] - tost.tssa(alone, case.temperature, **form)).abs().max() < BOUND


@backends
@forms
def test_nobody_sees_the_future(backend, form):
    case = make((2, 40, 3, 6), 3, form)
    decay = case.decay
    arguments = (case.temperature, case.bias)
    y = tost.causal_tssa_with_state(case.w, *arguments, **options(case), backend=backend)[0]
    later = torch.cat((case.w[:, :25], torch.full_like(case.w[:, 25:], float("inf"))), dim=1)
    if decay is not None and decay.dim() > 1:
        decay = torch.cat((decay[:, :25], torch.zeros_like(decay[:, 25:])), dim=1)
    changed = tost.causal_tssa_with_state(later, *arguments, **options(case, decay=decay), backend=backend)[0]
    assert torch.equal(changed[:, :25], y[:, :25])


@backends
@forms
def test_packed_sequences_are_taken_alone(backend, form):
    case = make((3, 30, 2, 6), 5, form, masked=False)
    lengths = (7, 0, 23)
    w = torch.cat([case.w[i, :n] for i, n in enumerate(lengths)]).unsqueeze(0).requires_grad_()
    decay = case.decay
    if decay is not None and decay.dim() > 1:
        decay = torch.cat([decay[i, :n] for i, n in enumerate(lengths)]).unsqueeze(0)
    cu_seqlens = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    given = options(case, decay=decay, cu_seqlens=cu_seqlens, backend=backend)
    y, state = tost.causal_tssa_with_state(w, case.temperature, case.bias, **given)
    begin = 0
    for i, n in enumerate(lengths):
        own = case.decay if case.decay is None or case.decay.dim() == 1 else case.decay[i : i + 1, :n]
        here = options(case, decay=own, backend=backend) | {
            "state": tost.TSSAState(*(x[i : i + 1] for x in case.state))
        }
        z, after = tost.causal_tssa_with_state(case.w[i : i + 1, :n], case.temperature, case.bias, **here)
        assert_close("y", y[:, begin : begin + n], z, BOUND)
        assert_same_state(tost.TSSAState(*(x[i : i + 1] for x in state)), after)
        begin += n


@fast_backends
@forms
def test_gradcheck(backend, form):
    case = make((1, 4, 2, 6), 1, form)
    decay = None if case.decay is None else (0.2 + 0.7 * case.decay)  # away from the ends of what is allowed
    tensors = (case.w, case.temperature * 3, case.bias, *case.state[:3], *([] if decay is None else [decay]))
    tensors = tuple(x.detach().requires_grad_() for x in tensors)

    def call(w, t, bias, squares, weighted, mass, decay=None):
        state = tost.TSSAState(squares, weighted, mass, case.state.position)
        given = options(case, decay=decay, state=state, backend=backend)
        y, after = tost.causal_tssa_with_state(w, t, bias, **given)
        return (y, *after[:3])

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    if case.block_size < 3 and backend == "torch":  # a second derivative of factors takes seconds
        assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@fast_backends
@pytest.mark.parametrize("g", [1, 3])
def test_gradcheck_of_centered_tssa(backend, g):
    case = make_case((2, 4, 2, 6), torch.float64, masked=True)
    inputs = (case.w.requires_grad_(), case.temperature.requires_grad_())
    form = {"mask": case.mask, "block_size": g, "centered": True, "backend": backend}
    assert torch.autograd.gradcheck(lambda w, t: tost.tssa(w, t, **form), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda w, t: tost.tssa(w, t, **form), inputs, fast_mode=True)


def test_decays_that_forget_everything_neither_overflow_nor_lose_gradients():
    """A scan that divides by products of decays would have nothing to divide by after a few tokens."""
    w = torch.randn(1, 2000, 2, 4, requires_grad=True)
    decay = torch.rand(1, 2000, 2, 4).pow(8).requires_grad_()
    y, state = tost.causal_tssa_with_state(w, torch.ones(2), decay=decay, count_scaled=True, centered=True)
    y.sum().backward()
    for x in (y, *state, w.grad, decay.grad):
        assert x.isfinite().all()
    exact = tost.causal_tssa(
        w.detach().double(), torch.ones(2), decay=decay.detach().double(), count_scaled=True, centered=True
    )
    assert_close("y", y, exact, 1e-4)


def test_removing_a_mean_makes_centered_outputs_independent_of_it():
    case = make_case((2, 50, 3, 6), torch.float64)
    uniform = torch.zeros(3, dtype=torch.float64)  # memberships do not look at the tokens
    moved = case.w + 3 * torch.randn(2, 1, 3, 6, dtype=torch.float64)
    for g in (1, 3):
        for call in (tost.tssa, tost.causal_tssa):
            y = call(case.w, uniform, block_size=g, centered=True)
            assert (call(moved, uniform, block_size=g, centered=True) - y).abs().max() < 1e-6


def test_centered_blocks_stay_bounded_beside_a_large_mean():
    w = 1e3 + torch.randn(1, 60, 2, 8)
    for g in (1, 8):
        y = tost.causal_tssa(w, torch.ones(2), block_size=g, centered=True)
        assert y.isfinite().all()
        assert y.abs().max() < 10


def test_states_of_decays_from_the_data_merge():
    case = make((2, 30, 3, 6), 2, {"decay": "head"}, masked=False)
    given = options(case, mask=None)
    whole = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **given)[1]
    zeros = {name: torch.zeros_like(getattr(case.state, name)) for name in ("weighted_squares", "mass")}
    context = case.state._replace(**zeros, squares=case.state.squares, position=case.state.position)
    later = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **(given | {"state": context}))[1]
    squares = tost.causal_tssa_with_state(case.w, case.temperature, count_scaled=True, decay=case.decay)[1].squares
    later = later._replace(squares=squares, position=torch.full((2,), 30))
    assert_same_state(case.state.merge(later, case.decay.prod(dim=1)), whole)


@forms
def test_the_fastest_backend_takes_every_form(form):
    w, form = torch.randn(1, 4, 2, 6), {"centered": False} | form
    decay = None if isinstance(form["decay"], bool) else torch.rand((1, 4, 2, 6)[: 3 + (form["decay"] == "channel")])
    chosen = causal_form(decay, count_scaled=True, block_size=form.get("block_size", 1), centered=form["centered"])
    assert select("causal_tssa", "auto", w, chosen).backend.name == FAST_BLOCK_BACKENDS[0]
    assert select("tssa", "auto", w, Form(centered=True)).backend.name == FAST_BLOCK_BACKENDS[0]


@pytest.mark.parametrize(
    ("decay", "g", "message"),
    [
        (torch.rand(2, 5, 3, 4), 2, r"shape \(2, 5, 3, 4\).*\[2, 5, 3, 2\] per block of 2.*unflatten"),
        (torch.rand(2, 4, 3), 1, r"shape \(2, 4, 3\).*from the data \[2, 5, 3\] or \[2, 5, 3, 4\] per channel"),
        (torch.full((2, 5, 3), 1.5), 1, r"decay lies in \[1.5, 1.5\]"),
        (torch.full((2, 5, 3), float("nan")), 1, r"decay lies in \[nan, nan\]"),
    ],
)
def test_bad_decays_are_refused(decay, g, message):
    with pytest.raises(ValueError, match=message):
        tost.causal_tssa(torch.randn(2, 5, 3, 4), torch.ones(3), decay=decay, block_size=g)


def test_a_state_of_another_form_is_refused():
    w, t, state = torch.randn(2, 5, 3, 4), torch.ones(3), tost.TSSAState.empty(2, 3, 4)
    with pytest.raises(ValueError, match=r"weighted_squares.*needs \(2, 3, 8\).*centered=True"):
        tost.causal_tssa_with_state(w, t, state=state, centered=True)
    with pytest.raises(ValueError, match=r"mass.*needs \(2, 3, 4\).*this decay"):
        tost.causal_tssa_with_state(w, t, state=state, decay=torch.rand(2, 5, 3, 4))
    with pytest.raises(ValueError, match=r"squares.*needs \(2, 3, 5\).*state=None"):
        tost.causal_tssa_with_state(w, t, state=state, decay=torch.rand(2, 5, 3), count_scaled=True)
