"""Packed sequences: any cut of a batch into sequences gives what each of them gives alone, on every backend."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.ops.cases import BACKENDS, BOUNDS, FAST_BACKENDS, Case, make_case, part, takes, whole_options
from tost.testing import assert_close

H, D = 3, 4
OPTIONS = [
    {},
    {"masked": True, "count_scaled": True},
    {"bias": True, "state": True, "decay": True, "count_scaled": True, "masked": True},
    {"bias": True, "state": True, "decay": True, "block_size": 2},
    {"bias": True, "state": True, "decay": "head", "count_scaled": True, "masked": True},
    {"state": True, "decay": "channel", "centered": True, "block_size": 2, "masked": True},
]
IDS = ["plain", "masked and scaled", "all but blocks", "blocks", "decays of heads", "decays of channels"]
# Empty sequences, single tokens, pairs, one chunk of the kernels, one token more, several chunks.
lengths_of_sequences = st.lists(st.sampled_from([0, 1, 2, 3, 17, 64, 65, 130]), min_size=1, max_size=4)
examples = settings(max_examples=6, deadline=None)


def backends(options):
    return [name for name in BACKENDS if takes(name, options)]


cases = pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param(name, options, id=f"{name} {text}", marks=pytest.mark.slow if name == "triton" and options else ())
        for options, text in zip(OPTIONS, IDS, strict=True)
        for name in backends(options)
    ],
)


def packed_case(lengths, options, seed=0, dtype=torch.float64):
    """A case in one row, with the state of every sequence, and its cu_seqlens."""
    case = make_case((1, sum(lengths), H, D), dtype, seed=seed, **{**options, "state": False})
    states = make_case((len(lengths), 1, H, D), dtype, seed=seed, **options)
    bias = None if case.bias is None else torch.randn(H, max(lengths) + 4, dtype=case.bias.dtype)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return replace(case, state=states.state, dstate=states.dstate, bias=bias), cu_seqlens


def leaves(case):
    """The tensors of a case that gradients are taken of, by name."""
    found = {"w": case.w, "temperature": case.temperature, "bias": case.bias, "decay": case.decay}
    if case.state is not None:
        found |= dict(zip(("squares", "weighted_squares", "mass"), case.state[:3], strict=True))
    return {name: x.detach().clone().requires_grad_() for name, x in found.items() if x is not None}


def run(case: Case, inputs, backend, *, causal, **packing):
    """Outputs of an operator: y, and the sums after the last token if it is causal."""
    options = whole_options(case, backend=backend)
    del options["normalize"]
    if not causal:
        return (tost.tssa(inputs["w"], inputs["temperature"], **options, **packing),)
    state = None
    if case.state is not None:
        sums = (inputs[name] for name in ("squares", "weighted_squares", "mass"))
        state = tost.TSSAState(*sums, case.state.position)
    y, after = tost.causal_tssa_with_state(
        inputs["w"],
        inputs["temperature"],
        inputs.get("bias"),
        state=state,
        decay=inputs.get("decay"),
        **options,
        **packing,
    )
    return y, *after


def gradients(case, inputs, outputs):
    cotangents = (case.dy, *case.dstate)[: len(outputs)]
    floating = [x for x in outputs if x.is_floating_point()]
    return torch.autograd.grad(
        floating, list(inputs.values()), cotangents[: len(floating)], allow_unused=True, materialize_grads=True
    )


def alone(case, inputs, backend, lengths, *, causal):
    """The outputs of every sequence run alone, joined."""
    results, begin = [], 0
    for i, length in enumerate(lengths):
        rows, row = slice(begin, begin + length), slice(i, i + 1)
        begin += length
        mine = {name: part(x, rows) if name in ("w", "decay") else x for name, x in inputs.items()}
        mine |= {name: mine[name][row] for name in ("squares", "weighted_squares", "mass") if name in mine}
        mask = None if case.mask is None else case.mask[:, rows]
        state = None if case.state is None else case.state._replace(position=case.state.position[row])
        results.append(run(replace(case, mask=mask, state=state), mine, backend, causal=causal))
    y, *sums = zip(*results, strict=True)
    return torch.cat(y, dim=1), *(torch.cat(x) for x in sums)


@cases
@pytest.mark.parametrize("causal", [False, True], ids=["tssa", "causal"])
@examples
@given(lengths=lengths_of_sequences, seed=st.integers(0, 2**31))
def test_packed_is_each_sequence_alone(backend, options, causal, lengths, seed):
    if backend == "triton":
        lengths = [min(length, 17) for length in lengths]
    case, cu_seqlens = packed_case(lengths, options, seed)
    inputs, others = leaves(case), leaves(case)
    outputs = run(case, inputs, backend, causal=causal, cu_seqlens=cu_seqlens)
    expected = alone(case, others, "reference", lengths, causal=causal)
    for i, (actual, wanted) in enumerate(zip(outputs, expected, strict=True)):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-10, msg=f"output {i}")
    found = gradients(case, inputs, outputs)
    for name, actual, wanted in zip(inputs, found, gradients(case, others, expected), strict=True):
        # A token alone is its own mean, so that what is left may be all rounding.
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-9, msg=f"d{name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize("causal", [False, True], ids=["tssa", "causal"])
def test_native_sequences_are_the_same_bits_packed_and_alone(causal, options, dtype):
    lengths = [1, 130, 2, 0, 64, 257, 65]
    case, cu_seqlens = packed_case(lengths, options, dtype=dtype)
    inputs, others = leaves(case), leaves(case)
    outputs = run(case, inputs, "native", causal=causal, cu_seqlens=cu_seqlens)
    expected = alone(case, others, "native", lengths, causal=causal)
    assert all(torch.equal(actual, wanted) for actual, wanted in zip(outputs, expected, strict=True))
    dw, *_ = gradients(case, inputs, outputs)
    wanted, *_ = gradients(case, others, expected)
    assert torch.equal(dw, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True], ids=["tssa", "causal"])
def test_segment_ids_pack_each_row_of_a_batch(backend, causal):
    ids = torch.tensor([[7, 7, 7, 2, 2, 9], [0, 0, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8]])
    case = make_case((3, 6, H, D), torch.float64, masked=True, bias=True)
    inputs = leaves(case)
    y, *after = run(case, inputs, backend, causal=causal, segment_ids=ids)
    for row in range(3):
        for each in ids[row].unique():
            own = ids[row] == each
            mine = {**inputs, "w": inputs["w"][row : row + 1, own]}
            mask = case.mask[row : row + 1, own]
            expected = run(replace(case, mask=mask), mine, "reference", causal=causal)[0]
            assert_close("y", y[row : row + 1, own], expected, 1e-12)
    if causal:
        assert after[-1].shape == (10,)
        assert after[-1].tolist()[3] == int(case.mask[1].sum())


@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_dtypes_stay_within_their_bounds(backend):
    for dtype, bound in BOUNDS.items():
        case, cu_seqlens = packed_case([5, 20, 1], {"bias": True, "masked": True}, dtype=dtype)
        y = run(case, leaves(case), backend, causal=True, cu_seqlens=cu_seqlens)[0]
        wide = case.double()
        expected = run(wide, leaves(wide), "reference", causal=True, cu_seqlens=cu_seqlens)[0]
        assert y.dtype == dtype
        assert_close(str(dtype), y, expected, bound)


@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_second_derivatives_forward_mode_and_vmap(backend):
    cu_seqlens = torch.tensor([0, 1, 4], dtype=torch.int32)
    w, t = torch.randn(1, 4, 2, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def function(w, t):
        options = {"cu_seqlens": cu_seqlens, "backend": backend}
        return tost.tssa(w, t, **options) + tost.causal_tssa(w, t, **options)

    arguments = (w.requires_grad_(), t.requires_grad_())
    assert torch.autograd.gradcheck(function, arguments, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, arguments, fast_mode=True)
    batch = torch.randn(2, 1, 4, 2, 2, dtype=torch.float64)
    mapped = torch.vmap(lambda w: function(w, t.detach()))(batch)
    torch.testing.assert_close(mapped, torch.stack([function(w, t.detach()) for w in batch]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_and_memberships(backend):
    case, cu_seqlens = packed_case([4, 1, 7], {})
    w, t = case.w, case.temperature
    y = tost.tssa(w, t, cu_seqlens=cu_seqlens)
    causal, after = tost.causal_tssa_with_state(w, t, cu_seqlens=cu_seqlens)
    for ids in (cu_seqlens, None):
        segments = None if ids is not None else torch.tensor([[0] * 4 + [1] + [2] * 7])
        into, out = w.clone(), w.clone()
        given = {"cu_seqlens": ids, "segment_ids": segments, "backend": backend, "overwrite": True}
        assert_close("y", tost.tssa(into, t, **given), y, 1e-12)
        z, state = tost.causal_tssa_with_state(out, t, **given)
        assert_close("causal y", z, causal, 1e-12)
        assert_close("mass", state.mass, after.mass, 1e-12)
    rows = torch.tensor([[0, 0, 1], [1, 1, 1]]).t()  # packed into rows that do not lie one after the other
    spread = torch.randn(2, 3, H, D, dtype=torch.float64).transpose(0, 1)
    expected = tost.tssa(spread.contiguous(), t, segment_ids=rows)
    found = tost.tssa(spread, t, segment_ids=rows, backend=backend, overwrite=True)
    assert_close("rows", found, expected, 1e-12)
    assert_close("pi", tost.membership(w, t, cu_seqlens=cu_seqlens)[:, 5:], tost.membership(w[:, 5:], t), 1e-12)
    pi = tost.causal_membership(w, t, cu_seqlens=cu_seqlens)
    assert_close("causal pi", pi[:, 5:], tost.causal_membership(w[:, 5:], t), 1e-12)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", [name for name in ("native", "triton") if name in BACKENDS])
def test_compiled_calls_take_new_lengths_without_a_graph_break(backend, compiler):
    @torch.compile(fullgraph=True, dynamic=True, backend=compiler)
    def step(w, t, bias, cu_seqlens):
        y = tost.tssa(w, t, cu_seqlens=cu_seqlens, backend=backend)
        return y + tost.causal_tssa(w, t, bias, cu_seqlens=cu_seqlens, backend=backend)

    w, t, bias = torch.randn(1, 12, H, D), torch.rand(H), torch.randn(H, 12)
    for lengths in ([5, 7], [12, 0], [1, 11]):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        options = {"cu_seqlens": cu_seqlens, "backend": "reference"}
        expected = tost.tssa(w, t, **options) + tost.causal_tssa(w, t, bias, **options)
        assert_close("y", step(w, t, bias, cu_seqlens), expected, 1e-5)
    if backend == "native":  # the kernel is the first to look at the numbers; those of a GPU never do
        with pytest.raises(ValueError, match="never decrease"):
            step(w, t, bias, torch.tensor([0, 20, 12], dtype=torch.int32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3])}, "goes from 0 to 3, but there are 6 tokens"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 6])}, "never decrease"),
        ({"cu_seqlens": torch.tensor([1, 6])}, "begin with 0"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "int32 tensor"),
        ({"cu_seqlens": torch.tensor([[0, 6]])}, r"\[S \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0, 6]), "segment_ids": torch.zeros(1, 6)}, "pass one of them"),
        ({"segment_ids": torch.tensor([[1, 1, 2, 2, 1, 1]])}, "comes back"),
        ({"segment_ids": torch.zeros(1, 6)}, "integers"),
        ({"segment_ids": torch.zeros(1, 5, dtype=torch.int64)}, "1 rows of 5 tokens"),
    ],
)
def test_bad_descriptions_are_refused(arguments, message):
    w, t = torch.randn(1, 6, H, D), torch.ones(H)
    for operator in (tost.tssa, tost.causal_tssa, tost.membership, tost.causal_membership):
        with pytest.raises(ValueError, match=message):
            operator(w, t, **arguments)


def test_what_does_not_fit_the_packing_is_refused():
    w, t, cu_seqlens = torch.randn(1, 6, H, D), torch.ones(H), torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="one row, but there are 2"):
        tost.tssa(w.expand(2, -1, -1, -1), t, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=r"needs \(2, 3, 4\)"):
        tost.causal_tssa_with_state(w, t, cu_seqlens=cu_seqlens, state=tost.TSSAState.empty(1, H, D))
    with pytest.raises(ValueError, match="covers 3 positions, but the sequence reaches position 4"):
        tost.causal_tssa(w, t, torch.zeros(H, 3), cu_seqlens=cu_seqlens)
    assert tost.causal_tssa(w, t, torch.zeros(H, 4), cu_seqlens=cu_seqlens).shape == w.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequence_at_all(backend):
    w, t, none = torch.randn(1, 0, H, D), torch.ones(H), torch.tensor([0], dtype=torch.int32)
    assert tost.tssa(w, t, cu_seqlens=none, backend=backend).shape == w.shape
    y, after = tost.causal_tssa_with_state(w, t, cu_seqlens=none, backend=backend)
    assert y.shape == w.shape
    assert after.mass.shape == (0, H)
