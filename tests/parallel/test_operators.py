"""The operators over one, two and three processes against one process: outputs, state, and every gradient."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.cases import Case, assemble, cases_for, random_cases, run_alone, run_exact, run_shared
from tests.parallel.ranks import run_ranks
from tost.parallel import ContextParallel
from tost.testing import assert_close, relative_rms

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 1e-2}
# Measured with a number of their own size beside them: sums over all tokens of terms of either sign, which may cancel,
# and gradients of a state of which the tokens may have left next to nothing, or of gates that all but cancel out.
BESIDE = {"dtemperature": 10.0, "dbias": 10.0, "dmean": 1.0, "dcovariance": 1.0, "dmass": 1.0, "dwrite": 1.0}


def run_all(cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    context = ContextParallel()
    return [run_shared(case, context) for case in cases]


def compared(name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x.flatten(), x.new_full((1,), BESIDE[name]))) if name in BESIDE else x


def check(cases: list[Case], ranks: list[list[dict[str, torch.Tensor]]]) -> None:
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        whole = assemble(list(results)), run_alone(case), run_exact(case)
        assert whole[0].keys() == whole[1].keys()
        for name in whole[0]:
            actual, expected, exact = (compared(name, result[name]) for result in whole)
            # One process rounds too: where terms cancel, some of its own results are off by more than the bound.
            bound = max(BOUNDS[case.dtype], 5 * relative_rms(expected, exact))
            assert_close(f"{name} of {case}", actual, expected, bound)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_equal_one_process(size, tmp_path):
    cases = cases_for(size) + random_cases(size, count=20, seed=size)
    check(cases, run_ranks(size, tmp_path, run_all, cases))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_equal_one_process_at_random(size, tmp_path):
    cases = random_cases(size, count=400, seed=10 + size)
    check(cases, run_ranks(size, tmp_path, run_all, cases))
