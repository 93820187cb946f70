"""Every backend against the reference in float64: outputs, state and every gradient."""

from itertools import product

import pytest
import torch

import tost
from tests.ops.cases import (
    BOUNDS,
    FAST_BACKENDS,
    SHAPES,
    assert_all_close,
    backends,
    continued,
    dtypes,
    fast_backends,
    gated,
    leaves,
    make_case,
    on_blocks,
    outputs,
    plain,
    run_causal,
    run_tssa,
    shape_id,
)
from tost.ops._blocks import Factors, matrices, packed_width, products
from tost.ops._library import compiled_isas
from tost.testing import assert_close

EVERY = {"masked": True, "bias": True, "state": True}
# One block and several, sizes that are powers of 2 and others, tiles that are full and those that are not.
BLOCK_SHAPES = [
    ((1, 1, 1, 2), 2),
    ((5, 2, 4, 4), 4),
    ((2, 67, 3, 6), 3),
    ((1, 70, 3, 48), 8),
    ((2, 67, 2, 24), 8),
    ((2, 140, 3, 48), 16),
]


def compare(case, backend, runs=(run_tssa, run_causal), bound=None, against="reference"):
    for run in runs:
        assert_all_close(run(case, backend), run(case.double(), against), bound or BOUNDS[case.w.dtype])


def run_gated(case, backend):
    w, t = case.w.detach().requires_grad_(), case.temperature.detach().requires_grad_()
    y = gated(w, t, case.block_size, mask=case.mask, backend=backend)
    return dict(zip(("y", "dw", "dtemperature"), (y, *torch.autograd.grad(y, (w, t), case.dy)), strict=True))


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


@dtypes
@pytest.mark.parametrize("backend", [name for name in FAST_BACKENDS if name != "triton"])
@pytest.mark.parametrize(("shape", "g"), BLOCK_SHAPES, ids=str)
@pytest.mark.parametrize(("masked", "normalize"), [(False, True), (True, True), (True, False)])
def test_blocks_match_reference(backend, shape, g, dtype, masked, normalize):
    case = make_case(shape, dtype, masked=masked, normalize=normalize, block_size=g)
    compare(case, backend, [run_tssa], 2 * BOUNDS[dtype])


@dtypes
@pytest.mark.parametrize("isa", compiled_isas())
def test_native_kernels_agree_on_every_instruction_set(isa, dtype):
    try:
        tost.ops.select_isa(isa)
    except tost.errors.ConfigError as error:
        pytest.skip(str(error))
    try:
        for width in (19, 32, 48, 64):
            compare(make_case((2, 131, 3, width), dtype, **EVERY), "native", against="torch")
        for g in (1, 2, 4, 8, 16):
            case = make_case((1, 66, 5, 3 * g), dtype, masked=True, block_size=g)
            compare(case, "native", [run_tssa], 2 * BOUNDS[dtype], "torch")
            compare(case, "native", [run_gated], 10 * BOUNDS[dtype], "torch")
    finally:
        tost.ops.select_isa("auto")


@fast_backends
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_results_stay_accurate_over_65536_tokens(backend, dtype, bound):
    cases = [(make_case((1, 65_536, 2, 8), dtype, bias=True), (run_tssa, run_causal))]
    if backend != "triton":
        cases.append((make_case((1, 16_384, 1, 8), dtype, block_size=4), (run_tssa,)))
    for case, runs in cases:
        for run in runs:
            actual, expected = run(case, backend), run(case.double(), "reference")
            for name in {"y", "squares", "weighted_squares", "mass", "dw"} & actual.keys():
                assert_close(name, actual[name], expected[name], bound)


@on_blocks()
def test_overwriting_gives_the_same_numbers(backend, block_size):
    case = make_case((2, 70, 3, 6), torch.float64, block_size=block_size, **EVERY)
    with torch.no_grad():
        y, (z, after) = plain(case, backend), continued(case, backend)
        for copy in (torch.clone, lambda w: w.transpose(1, 2).contiguous().transpose(1, 2)):
            w, v = copy(case.w), copy(case.w)
            found = plain(case, backend, w=w, overwrite=True)
            other, state = continued(case, backend, w=v, overwrite=True)
            for given, result, expected in ((w, found, y), (v, other, z)):
                assert (result.data_ptr() == given.data_ptr()) == (backend == "native" and given.is_contiguous())
                assert_close("y", result, expected, 1e-12)
            assert all(map(torch.equal, state, after))


def check_gradients(case, backend, *, causal, twice):
    inputs = leaves(case, causal=causal)

    def call(*tensors):
        results = outputs(case, dict(zip(inputs, tensors, strict=True)), backend, causal=causal)
        return tuple(x for x in results.values() if x.is_floating_point())

    given = tuple(inputs.values())
    assert torch.autograd.gradcheck(call, given, fast_mode=True)
    if twice:
        assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@on_blocks()
@pytest.mark.parametrize("normalize", [True, False])
def test_tssa_gradcheck(backend, block_size, normalize):
    case = make_case((2, 5, 2, 6), torch.float64, masked=True, normalize=normalize, block_size=block_size)
    check_gradients(case, backend, causal=False, twice=normalize and backend == "torch")


@backends
def test_causal_gradcheck(backend):
    check_gradients(make_case((2, 4, 2, 6), torch.float64, **EVERY), backend, causal=True, twice=backend == "torch")


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
