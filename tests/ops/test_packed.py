"""Packed sequences: any cut of a batch into sequences gives what each of them gives alone, on every backend."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.ops.cases import (
    BACKENDS,
    BOUNDS,
    OPERATORS,
    SUMS,
    backends,
    fast_backends,
    gated,
    gradients,
    leaves,
    make_case,
    on_operators,
    outputs,
    takes,
)
from tost.testing import assert_close

H, D = 3, 4
# Of either operator: the causal one has no blocks, the other neither bias nor state.
OPTIONS = {
    "tssa": [{}, {"masked": True, "normalize": False}, {"masked": True, "block_size": 2}],
    "causal": [{}, {"bias": True, "masked": True}, {"bias": True, "state": True, "masked": True}],
}
CASES = [(op, options) for op, each in OPTIONS.items() for options in each]
# Empty sequences, single tokens, pairs, one chunk of the kernels, one token more, several chunks.
lengths_of_sequences = st.lists(st.sampled_from([0, 1, 2, 3, 17, 64, 65, 130]), min_size=1, max_size=4)
examples = settings(max_examples=6, deadline=None)
calls = pytest.mark.parametrize(
    ("backend", "op", "options"),
    [
        pytest.param(name, op, given, id=f"{name} {op} {' '.join(given)}")
        for op, given in CASES
        for name in BACKENDS
        if takes(name, given.get("block_size", 1))
    ],
)


def packed_case(lengths, options, seed=0, dtype=torch.float64):
    """A case in one row, with the state of every sequence, and its cu_seqlens."""
    case = make_case((1, sum(lengths), H, D), dtype, seed=seed, **{**options, "state": False})
    states = make_case((len(lengths), 1, H, D), dtype, seed=seed, **options)
    bias = None if case.bias is None else torch.randn(H, max(lengths) + 4, dtype=case.bias.dtype)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return replace(case, state=states.state, dstate=states.dstate, bias=bias), cu_seqlens


def alone(case, inputs, backend, lengths, *, causal):
    """The outputs of every sequence run alone, joined."""
    results, begin = [], 0
    for i, length in enumerate(lengths):
        rows, row = slice(begin, begin + length), slice(i, i + 1)
        begin += length
        mine = inputs | {"w": inputs["w"][:, rows]}
        mine |= {name: mine[name][row] for name in SUMS if name in mine}
        mask = None if case.mask is None else case.mask[:, rows]
        state = None if case.state is None else case.state._replace(position=case.state.position[row])
        results.append(outputs(replace(case, mask=mask, state=state), mine, backend, causal=causal))
    return {name: torch.cat([each[name] for each in results], dim=int(name == "y")) for name in results[0]}


@calls
@examples
@given(lengths=lengths_of_sequences, seed=st.integers(0, 2**31))
def test_packed_is_each_sequence_alone(backend, op, options, lengths, seed):
    if backend == "triton":
        lengths = [min(length, 17) for length in lengths]
    case, cu_seqlens = packed_case(lengths, options, seed)
    causal = op == "causal"
    inputs, others = (leaves(case, causal=causal) for _ in range(2))
    results = outputs(case, inputs, backend, causal=causal, cu_seqlens=cu_seqlens)
    expected = alone(case, others, "reference", lengths, causal=causal)
    results |= gradients(case, inputs, results)
    expected |= gradients(case, others, expected)
    for name, wanted in expected.items():
        torch.testing.assert_close(results[name], wanted, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "options"), CASES, ids=str)
def test_native_sequences_are_the_same_bits_packed_and_alone(op, options, dtype):
    lengths, causal = [1, 130, 2, 0, 64, 257, 65], op == "causal"
    case, cu_seqlens = packed_case(lengths, options, dtype=dtype)
    inputs, others = (leaves(case, causal=causal) for _ in range(2))
    results = outputs(case, inputs, "native", causal=causal, cu_seqlens=cu_seqlens)
    expected = alone(case, others, "native", lengths, causal=causal)
    assert all(torch.equal(results[name], wanted) for name, wanted in expected.items())
    assert torch.equal(*(gradients(*each)["dw"] for each in ((case, inputs, results), (case, others, expected))))


@on_operators()
def test_segment_ids_pack_each_row_of_a_batch(backend, run):
    ids = torch.tensor([[7, 7, 7, 2, 2, 9], [0, 0, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8]])
    case = make_case((3, 6, H, D), torch.float64, masked=True)
    y = run(case.w, case.temperature, mask=case.mask, segment_ids=ids, backend=backend)
    for row in range(3):
        for each in ids[row].unique():
            own, rows = ids[row] == each, slice(row, row + 1)
            mask = case.mask[rows, own]
            expected = run(case.w[rows, own], case.temperature, mask=mask, backend="reference")
            assert_close("y", y[rows, own], expected, 1e-12)


@backends
def test_states_of_segments_are_in_the_order_of_rows(backend):
    ids = torch.tensor([[7, 7, 2], [0, 0, 0], [3, 4, 4]])
    case = make_case((3, 3, H, D), torch.float64)
    _, state = tost.causal_tssa_with_state(case.w, case.temperature, segment_ids=ids, backend=backend)
    assert state.position.tolist() == [2, 1, 3, 1, 2]


@fast_backends
def test_dtypes_stay_within_their_bounds(backend):
    for dtype, bound in BOUNDS.items():
        case, cu_seqlens = packed_case([5, 20, 1], {"bias": True, "masked": True}, dtype=dtype)
        run = {"causal": True, "cu_seqlens": cu_seqlens}
        y = outputs(case, leaves(case, causal=True), backend, **run)["y"]
        wide = case.double()
        expected = outputs(wide, leaves(wide, causal=True), "reference", **run)["y"]
        assert y.dtype == dtype
        assert_close(str(dtype), y, expected, bound)


@on_operators([name for name in BACKENDS if name != "reference"])
def test_second_derivatives_forward_mode_and_vmap(backend, run):
    cu_seqlens = torch.tensor([0, 1, 4], dtype=torch.int32)
    w, t = torch.randn(1, 4, 2, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def function(w, t):
        return run(w, t, cu_seqlens=cu_seqlens, backend=backend)

    arguments = (w.requires_grad_(), t.requires_grad_())
    assert torch.autograd.gradcheck(function, arguments, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, arguments, fast_mode=True)
    batch = torch.randn(2, 1, 4, 2, 2, dtype=torch.float64)
    mapped = torch.vmap(lambda w: function(w, t.detach()))(batch)
    torch.testing.assert_close(mapped, torch.stack([function(w, t.detach()) for w in batch]))


@backends
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
@on_operators([name for name in ("native", "triton") if name in BACKENDS])
def test_compiled_calls_take_new_lengths_without_a_graph_break(backend, run, compiler):
    # A compiler takes long to unroll the recurrence of the gates for any number of tokens.
    @torch.compile(fullgraph=True, dynamic=None if run is gated else True, backend=compiler)
    def step(w, t, cu_seqlens):
        return run(w, t, cu_seqlens=cu_seqlens, backend=backend)

    w, t = torch.randn(1, 12, H, D), torch.rand(H)
    for lengths in ([5, 7], [12, 0], [1, 11]):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        expected = run(w, t, cu_seqlens=cu_seqlens, backend="reference")
        assert_close("y", step(w, t, cu_seqlens), expected, 1e-5)
    if backend == "native":  # the kernel is the first to look at the numbers; those of a GPU never do
        with pytest.raises(ValueError, match="never decrease"):
            step(w, t, torch.tensor([0, 20, 12], dtype=torch.int32))


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
    for operator in (*OPERATORS.values(), tost.membership, tost.causal_membership):
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


@backends
def test_no_sequence_at_all(backend):
    w, t, none = torch.randn(1, 0, H, D), torch.ones(H), torch.tensor([0], dtype=torch.int32)
    for run in (tost.tssa, *([] if backend == "triton" else [gated])):
        assert run(w, t, cu_seqlens=none, backend=backend).shape == w.shape
    y, after = tost.causal_tssa_with_state(w, t, cu_seqlens=none, backend=backend)
    assert y.shape == w.shape
    assert after.mass.shape == (0, H)
