"""Every backend against the reference in float64: outputs, state and every gradient."""

import pytest
import torch

import tost
from tests.ops.cases import (
    BACKENDS,
    BOUNDS,
    FAST_BACKENDS,
    SHAPES,
    assert_all_close,
    dtype_id,
    make_case,
    run_causal,
    run_tssa,
    shape_id,
)
from tost.ops._library import compiled_isas
from tost.testing import assert_close

on_grid = [
    pytest.mark.parametrize("backend", FAST_BACKENDS),
    pytest.mark.parametrize("shape", SHAPES, ids=shape_id),
    pytest.mark.parametrize("dtype", BOUNDS, ids=dtype_id),
]


def grid(function):
    for mark in on_grid:
        function = mark(function)
    return function


@grid
@pytest.mark.parametrize(("masked", "normalize"), [(False, True), (False, False), (True, True), (True, False)])
def test_tssa_matches_reference(backend, shape, dtype, masked, normalize):
    case = make_case(shape, dtype, masked=masked, normalize=normalize)
    assert_all_close(run_tssa(case, backend), run_tssa(case.double(), "reference"), BOUNDS[dtype])


@grid
@pytest.mark.parametrize(("masked", "bias", "state"), [(0, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_causal_tssa_matches_reference(backend, shape, dtype, masked, bias, state):
    case = make_case(shape, dtype, masked=bool(masked), bias=bool(bias), state=bool(state))
    assert_all_close(run_causal(case, backend), run_causal(case.double(), "reference"), BOUNDS[dtype])


# The reference forgets token by token, so these are fewer shapes.
fast_backends = pytest.mark.parametrize("backend", FAST_BACKENDS)
option_shapes = pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 67, 3, 5), (2, 130, 2, 33), (5, 2, 4, 3)], ids=shape_id
)
dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=dtype_id)


@option_shapes
@dtypes
@pytest.mark.parametrize("normalize", [True, False])
@fast_backends
def test_count_scaled_tssa_matches_reference(backend, shape, dtype, normalize):
    case = make_case(shape, dtype, masked=normalize, normalize=normalize, count_scaled=True)
    assert_all_close(run_tssa(case, backend), run_tssa(case.double(), "reference"), BOUNDS[dtype])


@option_shapes
@dtypes
@pytest.mark.parametrize("flags", ["count_scaled", "decay", "masked bias state count_scaled decay"])
@fast_backends
def test_causal_tssa_with_options_matches_reference(backend, shape, dtype, flags):
    case = make_case(shape, dtype, **dict.fromkeys(flags.split(), True))
    assert_all_close(run_causal(case, backend), run_causal(case.double(), "reference"), BOUNDS[dtype])


@pytest.mark.parametrize("width", [32, 48, 64])
def test_options_on_the_head_widths_that_the_kernel_is_compiled_for(width):
    case = make_case((1, 70, 2, width), torch.float32, masked=True, state=True, count_scaled=True, decay=True)
    assert_all_close(run_causal(case, "native"), run_causal(case.double(), "reference"), BOUNDS[torch.float32])
    case = make_case((2, 140, 2, width), torch.float32, masked=True, count_scaled=True)
    assert_all_close(run_tssa(case, "native"), run_tssa(case.double(), "reference"), BOUNDS[torch.float32])


@pytest.mark.parametrize("isa", compiled_isas())
@pytest.mark.parametrize("dtype", BOUNDS, ids=dtype_id)
def test_native_kernels_agree_on_every_instruction_set(isa, dtype):
    try:
        tost.ops.select_isa(isa)
    except tost.errors.ConfigError as error:
        pytest.skip(str(error))
    try:
        for masked in (False, True):
            case = make_case((2, 131, 3, 19), dtype, masked=masked, bias=True, state=True)
            assert_all_close(run_tssa(case, "native"), run_tssa(case.double(), "reference"), BOUNDS[dtype])
            assert_all_close(run_causal(case, "native"), run_causal(case.double(), "reference"), BOUNDS[dtype])
    finally:
        tost.ops.select_isa("auto")


@pytest.mark.parametrize("backend", FAST_BACKENDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_tssa_stays_accurate_over_65536_tokens(backend, dtype, bound):
    case = make_case((1, 65_536, 2, 8), dtype)
    actual, expected = run_tssa(case, backend), run_tssa(case.double(), "reference")
    assert_close("y", actual["y"], expected["y"], bound)
    assert_close("dw", actual["dw"], expected["dw"], bound)


@pytest.mark.parametrize("backend", FAST_BACKENDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_causal_tssa_stays_accurate_over_65536_tokens(backend, dtype, bound):
    case = make_case((1, 65_536, 2, 8), dtype, bias=True)
    actual, expected = run_causal(case, backend), run_causal(case.double(), "reference")
    for name in ("y", "squares", "weighted_squares", "mass", "dw"):
        assert_close(name, actual[name], expected[name], bound)


@pytest.mark.parametrize("causal", [False, True], ids=["tssa", "causal"])
def test_native_result_does_not_depend_on_the_number_of_threads(causal):
    case = make_case((1, 1500, 4, 24), torch.float32, bias=causal)
    run = run_causal if causal else run_tssa
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(case, "native"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", [True, False])
def test_tssa_gradcheck(backend, normalize):
    torch.manual_seed(0)
    w = torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    t = torch.randn(3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 5, [False, True, True, True, False]])
    assert torch.autograd.gradcheck(
        lambda w, t: tost.tssa(w, t, mask=mask, normalize=normalize, backend=backend), (w, t)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_tssa_gradcheck_through_bias_and_state(backend):
    case = make_case((2, 5, 2, 3), torch.float64, masked=True, bias=True, state=True)
    tensors = (case.w, case.temperature, case.bias, *case.state[:3])
    tensors = tuple(x.detach().requires_grad_() for x in tensors)

    def call(w, t, bias, *sums):
        state = tost.TSSAState(*sums, case.state.position)
        y, after = tost.causal_tssa_with_state(w, t, bias, mask=case.mask, state=state, backend=backend)
        return (y, *after[:3])

    assert torch.autograd.gradcheck(call, tensors)
