"""The operators in JAX against the reference: values, states and every gradient."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integrations import jax_calls
from tests.ops.cases import assert_all_close, dtype_id, make_case, run_causal, run_tssa, shape_id

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"
# Relative rms against the reference in float64 on the same rounded numbers.
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2}
CASES = [((2, 37, 3, 6), torch.float64), ((2, 37, 3, 6), torch.float32), ((2, 37, 3, 6), torch.bfloat16)]
CASES += [((1, 1, 1, 1), torch.float64), ((2, 0, 3, 6), torch.float64)]


@pytest.fixture(scope="module")
def call():
    """Runs a function of `jax_calls` in a process that does nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


def to_numpy(x):
    """A tensor as numpy has it; bfloat16 as the type of the package ml_dtypes, which is JAX's."""
    if x.dtype != torch.bfloat16:
        return x.numpy()
    import ml_dtypes

    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def to_torch(x):
    return torch.from_numpy(x.astype(np.float64))


def check(found, expected, dtype):
    assert_all_close({name: to_torch(x) for name, x in found.items()}, expected, BOUNDS[dtype])


def cases(flags, *quick, empty=True):
    """All combinations of cases and options; those named `quick` run by default, in float64. Each is compiled.

    Not `empty`: without sequences of no tokens, of which torch takes no gradients.
    """
    return pytest.mark.parametrize(
        ("shape", "dtype", "flags"),
        [
            pytest.param(
                shape,
                dtype,
                words,
                id=f"{shape_id(shape)}-{dtype_id(dtype)}-{words}",
                marks=() if (shape, dtype) == CASES[0] and words in quick else pytest.mark.slow,
            )
            for shape, dtype in CASES
            if empty or shape[1] > 0
            for words in flags
        ],
    )


def make(shape, dtype, flags):
    """A case with some options by name; `blocks` are of three features, where there are as many.

    `by_head` and `by_channel` are decays from the data.
    """
    options = dict.fromkeys(flags.split(), True)
    options["block_size"] = 3 if options.pop("blocks", False) and shape[3] % 3 == 0 else 1
    for name in ("head", "channel"):
        if options.pop(f"by_{name}", False):
            options["decay"] = name
    options["normalize"] = not options.pop("unnormalized", False)
    return make_case(shape, dtype, **options)


def options_of(case):
    return {"count_scaled": case.count_scaled, "block_size": case.block_size, "centered": case.centered}


@cases(
    ["", "unnormalized", "masked", "blocks", "masked count_scaled", "masked centered", "centered blocks"],
    "masked count_scaled",
)
def test_tssa_matches_reference(call, shape, dtype, flags):
    case = make(shape, dtype, flags)
    found = call(
        jax_calls.run_tssa,
        {"w": to_numpy(case.w), "temperature": to_numpy(case.temperature)},
        [to_numpy(case.dy)],
        None if case.mask is None else case.mask.numpy(),
        {"normalize": case.normalize} | options_of(case),
        double=dtype == torch.float64,
    )
    check(found, run_tssa(case.double(), "reference"), dtype)


ALL = "masked bias state count_scaled decay"


FROM_DATA = [
    "by_head",
    "masked state by_head count_scaled",
    "masked bias state by_channel count_scaled",
    "state blocks by_channel centered",
]
PLAIN = ["", "bias", "masked bias state", "decay", "masked count_scaled", "state blocks", "state centered", ALL]


@cases(PLAIN + FROM_DATA, ALL, FROM_DATA[2], empty=False)
def test_causal_tssa_matches_reference(call, shape, dtype, flags):
    case = make(shape, dtype, flags)
    given = {"w": case.w, "temperature": case.temperature}
    given |= {name: getattr(case, name) for name in ("bias", "decay") if getattr(case, name) is not None}
    given |= {} if case.state is None else {name: getattr(case.state, name) for name in jax_calls.SUMS}
    found = call(
        jax_calls.run_causal,
        {name: to_numpy(x) for name, x in given.items()},
        [to_numpy(x) for x in (case.dy, *case.dstate)],
        None if case.mask is None else case.mask.numpy(),
        None if case.state is None else case.state.position.numpy(),
        options_of(case),
        double=dtype == torch.float64,
    )
    expected = run_causal(case.double(), "reference")
    del expected["position"]
    check(found, expected, dtype)


@pytest.mark.slow
def test_padding_may_hold_anything(call):
    case = make_case((2, 9, 3, 4), torch.float64, masked=True)
    given = {"w": case.w.masked_fill(~case.mask[..., None, None], torch.nan), "temperature": case.temperature}
    given = {name: to_numpy(x) for name, x in given.items()}
    found = call(jax_calls.run_tssa, given, [to_numpy(case.dy)], case.mask.numpy(), {}, double=True)
    check(found, run_tssa(case, "reference"), torch.float64)
    cotangents = [to_numpy(x) for x in (case.dy, *case.dstate)]
    found = call(jax_calls.run_causal, given, cotangents, case.mask.numpy(), None, {}, double=True)
    expected = run_causal(case, "reference")
    del expected["position"]
    check(found, expected, torch.float64)


@pytest.mark.slow
def test_zero_tokens_have_finite_gradients(call):
    """In float32 the square of the floor of a sum of squares is infinite when it is inverted."""
    given = {"w": np.zeros((1, 4, 2, 3), np.float32), "temperature": np.ones(2, np.float32)}
    ones = [np.ones((1, 4, 2, 3), np.float32)]
    assert all(np.isfinite(x).all() for x in call(jax_calls.run_tssa, given, ones, None, {}, double=False).values())
    ones += [np.ones(x, np.float32) for x in ((1, 2, 3), (1, 2, 3), (1, 2))]
    found = call(jax_calls.run_causal, given, ones, None, None, {}, double=False)
    assert all(np.isfinite(x).all() for x in found.values())


@pytest.mark.slow
def test_pieces_of_a_sequence_give_the_whole(call):
    case = make_case((2, 24, 3, 5), torch.float32)
    whole, pieces = call(jax_calls.in_pieces, case.w.numpy(), case.temperature.numpy(), np.float32([0.9, 1, 0.5]), 6)
    np.testing.assert_allclose(pieces, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_positions_count_real_tokens(call):
    w, mask = np.ones((2, 3, 1, 2), np.float32), np.array([[True, False, True], [False, False, False]])
    found, dtype = call(jax_calls.positions_after, w, mask, [4, 5])
    assert (found.tolist(), dtype) == ([6, 5], "int32")
    found, dtype = call(jax_calls.positions_after, w, None, None)
    assert (found.tolist(), dtype) == ([3, 3], "int32")


@pytest.mark.slow
def test_positions_beyond_the_table_of_biases_do_not_pass_unnoticed(call):
    assert call(jax_calls.beyond_the_table) == [False, False, True]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("tssa", {"w": ((3, 4, 6), "float32")}, "w has shape (3, 4, 6) and dtype float32; TSSA needs"),
        ("tssa", {"w": ((2, 3, 4, 6), "int32")}, "dtype int32; TSSA needs"),
        ("tssa", {"temperature": ((4, 1), "float32")}, "temperature has shape (4, 1) and dtype float32; it needs (4,)"),
        ("tssa", {"mask": ((2, 3), "float32")}, "mask has shape (2, 3) and dtype float32; it needs (2, 3)"),
        ("tssa", {"block_size": 4}, "block_size is 4; the 6 features of a head need one that divides 6"),
        ("causal_tssa", {"bias": ((4, 2), "float32")}, "bias has shape (4, 2) and dtype float32; it needs (4, 3) or"),
        ("causal_tssa", {"bias": ((2, 3, 5), "float32")}, "it needs (2, 3, 4) or (1, 3, 4)"),
        ("causal_tssa", {"decay": ((1,), "float32")}, "decay has shape (1,)"),
        ("causal_tssa", {"decay": ((2, 3, 4, 2), "float32")}, "it needs (4,) or (2, 3, 4) or (2, 3, 4, 6)"),
        ("causal_tssa", {"state": (2, 4, 5)}, "state.squares has shape (2, 4, 5)"),
        ("causal_tssa", {"state": (2, 4, 6), "block_size": 2}, "state.weighted_squares has shape (2, 4, 6)"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call, name, changes, said):
    assert said in call(jax_calls.message, name, changes)


@pytest.mark.slow
def test_the_page_runs(call):
    assert call(jax_calls.run_page, str(PAGE)) == 2
