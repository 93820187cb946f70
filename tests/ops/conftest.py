"""The tests of Triton kernels run in Python, so most of them are slow; the default suite keeps some of each kind."""

from importlib.util import find_spec

import pytest

if find_spec("triton"):
    from tests.ops.triton.interpreter import speed_up

    speed_up()

# What the default suite runs with the backend: the test, and parts of the identifier that stay.
QUICK = {
    "test_tssa_matches_reference": ("True-True-1x257x8x64-bfloat16-triton", "False-False-2x63x3x5-float64-triton"),
    "test_causal_tssa_matches_reference": ("1-1-1-2x63x3x5-float32-triton", "0-1-0-2x63x3x5-bfloat16-triton"),
    "test_empty_batches_and_sequences": ("",),
    "test_steps_equal_the_full_pass": ("",),
    "test_calls_compile_without_a_graph_break": ("",),
    "test_layout_does_not_matter": ("",),
    "test_zero_tokens_give_zero": ("",),
    "test_overwriting_gives_the_same_numbers": ("",),
    "test_autocast_keeps_statistics_in_float32": ("",),
    "test_second_backward_pass": ("triton-tssa", "triton-causal from a state"),
    "test_vmap": ("triton-step",),
    "test_batched_gradients_of_one_graph": ("",),
    "test_in_place_and_memberships": ("",),
    "test_no_sequence_at_all": ("",),
    "test_operators_run_on_the_meta_device": ("",),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or callspec.params.get("backend") != "triton":
            continue
        if not any(part in item.name for part in QUICK.get(item.originalname, ())):
            item.add_marker(pytest.mark.slow)
