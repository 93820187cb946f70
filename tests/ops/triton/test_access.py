"""What the kernels do to memory, seen by the interpreter: bytes moved, bounds, writers, and the order of programs."""

import numpy as np
import pytest
import torch

import tost
from tests.ops.cases import assert_all_close, make_case, run_causal, run_tssa

pytest.importorskip("triton", reason="triton has no packages for this platform")

from tests.ops.triton.interpreter import Access, Launch, metered_calls, watched
from tests.ops.triton.limits import TRAFFIC, check_traffic
from tost.ops.triton import launch

EVERYTHING = {"masked": True, "bias": True, "state": True}
# Sequences longer than one chunk; a last chunk that is not full; more chunks than one tile of the scan holds.
LONG = (1, 64 * 17 + 3, 2, 3)


@pytest.mark.parametrize(("H", "D"), [(4, 48), pytest.param(6, 64, marks=pytest.mark.slow)])
def test_bytes_moved_stay_near_what_the_sums_demand(H, D):
    found = metered_calls(H, D, 320)
    for name in TRAFFIC:
        seen, size = found[name]
        check_traffic(name, len(seen), sum(launch.bytes for launch in seen) / size)


def test_short_sequences_and_steps_are_one_launch():
    w, t = torch.randn(2, 20, 3, 5), torch.rand(3)
    with watched() as seen:
        tost.tssa(w, t, backend="triton")
    assert [launch.kernel for launch in seen] == ["tssa.whole"]
    state = tost.TSSAState.empty(2, 3, 5)
    for bias in (None, torch.randn(2, 1, 3)):
        with watched() as seen:
            tost.causal_tssa_with_state(w[:, :1].contiguous(), t, bias, state=state, backend="triton")
        assert [launch.kernel for launch in seen] == ["causal.step"]


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "all options"])
def test_a_step_is_a_sequence_of_one_token(options):
    case = make_case((3, 1, 3, 5), torch.float64, **options)
    arguments = (case.w, case.temperature, case.bias)
    keywords = {"mask": case.mask, "state": case.state}
    with torch.no_grad():
        y, after = tost.causal_tssa_with_state(*arguments, **keywords, backend="triton")
        z, expected = tost.causal_tssa_with_state(*arguments, **keywords, backend="reference")
    found = {"y": y, **after._asdict()}
    assert_all_close(found, {"y": z, **expected._asdict()}, 1e-12)


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (run_tssa, {"masked": True}),
        (run_causal, {"bias": True}),
        pytest.param(run_tssa, {"normalize": False}, marks=pytest.mark.slow),
        pytest.param(run_causal, EVERYTHING, marks=pytest.mark.slow),
    ],
)
def test_results_do_not_depend_on_the_order_of_programs(monkeypatch, run, options):
    """And nothing is read or written outside the tensors, written twice, or read where another program writes."""
    monkeypatch.setattr(launch, "SHORT", 0)  # several programs for short sequences too
    case = make_case((2, 150, 2, 3), torch.float32, **options)
    with watched() as launches:
        expected = run(case, "triton")
    assert all(launch.programs >= 1 for launch in launches)
    with watched(np.random.default_rng(0)):
        shuffled = run(case, "triton")
    assert all(torch.equal(shuffled[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("run", "options"),
    [(run_tssa, {}), (run_causal, {}), pytest.param(run_causal, EVERYTHING, marks=pytest.mark.slow)],
)
def test_padding_may_hold_anything(run, options):
    case = make_case((2, 70, 2, 3), torch.float64, **(options | {"masked": True}))
    expected = run(case, "reference")
    case.w[~case.mask] = torch.nan
    case.dy[~case.mask] = torch.inf
    assert_all_close(run(case, "triton"), expected, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "options"),
    [(run_tssa, {}), (run_tssa, {"masked": True}), (run_causal, {}), (run_causal, EVERYTHING)],
)
def test_sequences_with_more_chunks_than_a_tile_of_the_scan(run, options):
    case = make_case(LONG, torch.float64, **options)
    assert_all_close(run(case, "triton"), run(case, "torch"), 1e-11)


def test_the_watch_sees_what_is_wrong():
    tensor = np.arange(0, 64, 4)

    def check(loads=(), stores=()):
        found = Launch("kernel", 2, allocations=[(0, 64)])
        found.loads += [Access(program, part, 4) for program, part in enumerate(loads)]
        found.stores += [Access(program, part, 4) for program, part in enumerate(stores)]
        for access in found.loads + found.stores:
            found.check_bounds(access)
        found.check_writers()

    check(stores=[tensor[:8], tensor[8:]])
    with pytest.raises(AssertionError, match="program 1 reaches outside"):
        check(stores=[tensor[:8], tensor[8:] + 4])
    with pytest.raises(AssertionError, match="written twice"):
        check(stores=[tensor[:8], tensor[7:]])
    with pytest.raises(AssertionError, match="written in the same launch"):
        check(stores=[tensor[:8]], loads=[tensor[7:]])
