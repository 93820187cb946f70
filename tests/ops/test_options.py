"""Options that are not in the paper: energies that are scaled by the number of tokens, and statistics that forget."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.ops.cases import BACKENDS, assert_all_close, make_case, run_causal
from tost.ops._count import effective_count
from tost.testing import assert_close

backends = pytest.mark.parametrize("backend", BACKENDS)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 80), st.integers(1, 5), st.integers(1, 6))
seeds = st.integers(0, 2**31)
examples = settings(max_examples=8, deadline=None)
BOUND = 1e-10
EVERY_OPTION = {"masked": True, "bias": True, "state": True, "count_scaled": True, "decay": True}


def options(case, decay=None):
    return {"mask": case.mask, "state": case.state, "count_scaled": case.count_scaled, "decay": decay}


def make(size, seed, **flags):
    return make_case(size, torch.float64, seed=seed, **(EVERY_OPTION | flags))


@backends
@examples
@given(size=sizes, seed=seeds, times=st.integers(2, 4))
def test_scaled_energies_do_not_flatten_when_every_token_is_repeated(backend, size, seed, times):
    case = make(size, seed, state=False)
    repeated = (case.w.repeat(1, times, 1, 1), case.temperature)
    arguments = {"mask": case.mask.repeat(1, times), "count_scaled": True}
    y = tost.tssa(case.w, case.temperature, mask=case.mask, count_scaled=True, backend=backend)
    # The 1e-8 that is added to the mass weighs less beside more tokens.
    assert_close("y", tost.tssa(*repeated, **arguments, backend=backend), y.repeat(1, times, 1, 1), 1e-6)
    pi = tost.membership(case.w, case.temperature, mask=case.mask, count_scaled=True)
    assert_close("pi", tost.membership(*repeated, **arguments), pi.repeat(1, times, 1), BOUND)


@examples
@given(size=sizes, seed=seeds)
def test_at_the_last_token_both_forms_count_and_sum_the_same(size, seed):
    case = make(size, seed)
    causal = tost.causal_membership(case.w, case.temperature, count_scaled=True)
    whole = tost.membership(case.w, case.temperature, count_scaled=True)
    assert_close("pi", causal[:, -1], whole[:, -1], BOUND)


@backends
@pytest.mark.parametrize("count_scaled", [False, True])
def test_a_decay_of_one_is_the_plain_form(backend, count_scaled):
    case = make((2, 150, 3, 5), 0, count_scaled=count_scaled)
    ones = torch.ones(3, dtype=torch.float64)
    plain = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **options(case), backend=backend)
    decayed = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **options(case, ones), backend=backend)
    assert_close("y", decayed[0], plain[0], 1e-14)
    for name, a, b in zip(plain[1]._fields, decayed[1], plain[1], strict=True):
        assert_close(name, a, b, 1e-14)


@backends
@examples
@given(size=sizes, seed=seeds)
def test_sums_are_the_powers_of_the_decay_times_the_tokens(backend, size, seed):
    """Written with one matrix of powers per head instead of a recurrence."""
    case = make(size, seed, masked=False, state=False)
    n = torch.arange(size[1])
    distance = n[:, None] - n[None, :]
    powers = (case.decay[:, None, None] ** distance.clamp_min(0)).masked_fill(distance < 0, 0)  # [H, n, m]
    count = powers.sum(dim=-1).t()
    square = case.w.square()
    share = (square / torch.einsum("hnm,bmhd->bnhd", powers, square).clamp_min(1e-12)).sum(dim=-1)
    energy = count * share + size[3] * case.bias[:, : size[1]].t()
    pi = (case.temperature * energy).softmax(dim=-1)
    mass = torch.einsum("hnm,bmh->bnh", powers, pi)
    weighted = torch.einsum("hnm,bmhd->bnhd", powers, pi.unsqueeze(-1) * square)
    y = -pi.unsqueeze(-1) * case.w / (1 + weighted / (mass + 1e-8).unsqueeze(-1))
    arguments = (case.w, case.temperature, case.bias)
    actual, state = tost.causal_tssa_with_state(*arguments, **options(case, case.decay), backend=backend)
    assert_close("y", actual, y, BOUND)
    assert_close("mass", state.mass, mass[:, -1], BOUND)
    assert_close("weighted", state.weighted_squares, weighted[:, -1], BOUND)
    assert_close("pi", tost.causal_membership(*arguments, **options(case, case.decay)), pi, BOUND)


@examples
@given(size=sizes, seed=seeds)
def test_states_merge_in_any_grouping_and_as_the_recurrence_does(size, seed):
    B, N, H, D = size
    case = make(size, seed, masked=False)
    arguments = {"count_scaled": True, "decay": case.decay}
    whole = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, state=case.state, **arguments)[1]
    empty = tost.TSSAState.empty(B, H, D, dtype=torch.float64)
    squares = tost.causal_tssa_with_state(case.w, case.temperature, decay=case.decay)[1].squares
    context = empty._replace(squares=case.state.squares, position=case.state.position)
    piece = tost.causal_tssa_with_state(case.w, case.temperature, case.bias, state=context, **arguments)[1]
    piece = piece._replace(squares=squares, position=torch.full((B,), N))
    for name, a, b in zip(whole._fields, case.state.merge(piece, case.decay), whole, strict=True):
        assert_close(name, a, b, BOUND)
    left = case.state.merge(piece, case.decay).merge(whole, case.decay)
    right = case.state.merge(piece.merge(whole, case.decay), case.decay)
    for name, a, b in zip(left._fields, left, right, strict=True):
        assert_close(name, a, b, BOUND)
    for same in (empty.merge(piece, case.decay), piece.merge(empty, case.decay)):
        assert all(torch.equal(a, b) for a, b in zip(same, piece, strict=True))


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


def test_effective_count_has_two_derivatives():
    a = torch.tensor([0.2, 0.5, 0.7, 0.97, 1 - 1e-9], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[1, 2, 7], [30, 60, 3]])
    assert torch.autograd.gradcheck(lambda a: effective_count(a, t), (a,))
    assert torch.autograd.gradgradcheck(lambda a: effective_count(a, t), (a,))


def test_statistics_that_forget_stay_accurate_over_65536_tokens():
    """Against the PyTorch version in float64: the reference walks token by token."""
    case = make_case((1, 65_536, 2, 2), torch.float32, bias=True, count_scaled=True, decay=True)
    decay = torch.tensor([0.9, 1 - 1e-5])
    expected = run_causal(case_with(case.double(), decay=decay.double()), "torch")
    for backend in ("native", "torch"):
        actual = run_causal(case_with(case, decay=decay), backend)
        for name in ("y", "squares", "weighted_squares", "mass", "dw", "ddecay"):
            assert_close(f"{name} of {backend}", actual[name], expected[name], 1e-5)


def case_with(case, **changes):
    return type(case)(**(vars(case) | changes))


@pytest.mark.parametrize(
    ("backend", "N"),
    [("native", 18), ("torch", 3), pytest.param("torch", 40, marks=pytest.mark.slow)]
    + [(name, 18) for name in BACKENDS if name == "triton"],
)
def test_options_compile_without_a_graph_break(backend, N):
    case = make_case((2, N, 3, 5), torch.float32, **EVERY_OPTION)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(w, t, decay, position):
        state = case.state._replace(position=position)
        arguments = options(case, decay) | {"state": state, "backend": backend}
        y, after = tost.causal_tssa_with_state(w, t, case.bias, **arguments)
        return y + tost.tssa(w, t, mask=case.mask, count_scaled=True, backend=backend), after

    inputs = tuple(x.clone().requires_grad_() for x in (case.w, case.temperature, case.decay))
    y, after = step(*inputs, case.state.position)
    compiled = torch.autograd.grad((y, after.mass), inputs, (case.dy, case.dstate[2]))
    arguments = options(case, inputs[2]) | {"backend": backend}
    z, plain = tost.causal_tssa_with_state(*inputs[:2], case.bias, **arguments)
    z = z + tost.tssa(*inputs[:2], mask=case.mask, count_scaled=True, backend=backend)
    eager = torch.autograd.grad((z, plain.mass), inputs, (case.dy, case.dstate[2]))
    assert_close("y", y, z, 1e-6)
    for name, a, b in zip(("dw", "dtemperature", "ddecay"), compiled, eager, strict=True):
        assert_close(name, a, b, 1e-5)


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_autocast_keep_options_in_float32(backend, dtype):
    case = make_case((2, 40, 3, 5), torch.float32, **(EVERY_OPTION | {"state": False}))
    half, decay = case.w.to(dtype), case.decay.to(dtype)
    expected = tost.causal_tssa(half.double(), case.temperature, case.bias, **forget(case, decay), backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = tost.causal_tssa_with_state(
            half, case.temperature, case.bias, **forget(case, decay), backend=backend
        )
    assert (y.dtype, state.squares.dtype) == (dtype, torch.float32)
    assert_close("y", y, expected, 1e-2)


def forget(case, decay):
    return {"mask": case.mask, "count_scaled": True, "decay": decay}


@backends
@pytest.mark.parametrize("size", [(0, 5, 2, 3), (2, 0, 2, 3), (0, 0, 1, 1)], ids=str)
def test_options_take_empty_batches_and_sequences(backend, size):
    case = make_case(size, torch.float32, **EVERY_OPTION)
    results = run_causal(case, backend)
    for name, value in results.items():
        assert torch.isfinite(value).all(), name
    if size[1] == 0:
        assert torch.equal(results["mass"], case.state.mass)
        assert torch.equal(results["dsquares"], case.dstate[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", tost.ops._library.compiled_isas())
def test_options_agree_on_every_instruction_set(isa, dtype):
    try:
        tost.ops.select_isa(isa)
    except tost.errors.ConfigError as error:
        pytest.skip(str(error))
    bound = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    try:
        case = make_case((2, 131, 5, 19), dtype, **EVERY_OPTION)
        assert_all_close(run_causal(case, "native"), run_causal(case.double(), "reference"), bound)
    finally:
        tost.ops.select_isa("auto")


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        (torch.ones(2), r"decay has shape \(2,\) and dtype torch.float32, but w has 3 heads; it needs .* \[3\]"),
        (torch.ones(3, 1), r"decay has shape \(3, 1\).*\.flatten\(\)"),
        (torch.ones(3, dtype=torch.int64), r"dtype torch.int64"),
        (torch.ones(3, device="meta"), r"decay is on meta, but w is on cpu"),
        (torch.tensor([0.5, 0.0, 1.0]), r"decay lies in \[0, 1\]; each head must keep a share in \(0, 1\].*sigmoid"),
        (torch.tensor([0.5, 1.0, 1.0001]), r"decay lies in \[0\.5, 1\.0001\]"),
        (torch.tensor([0.5, float("nan"), 1.0]), r"decay lies in \[nan, nan\]"),
    ],
)
def test_bad_decay_is_refused(decay, message):
    w, t = torch.randn(2, 5, 3, 4), torch.ones(3)
    calls = (tost.causal_tssa, tost.causal_tssa_with_state, tost.causal_membership)
    for call in calls:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call(w, t, decay=decay)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        tost.causal_tssa_step(w[:, 0], t, decay=decay)
