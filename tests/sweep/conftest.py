"""Results of a small sweep."""

from __future__ import annotations

import pytest

from tests.sweep.samples import leave, make_plan, make_runs
from tost.sweep import collect


@pytest.fixture
def gathered(tmp_path, monkeypatch):
    """Gather results whose runs have given accuracies and parameters."""
    monkeypatch.setattr("sys.argv", ["tost", "sweep", "mine", "--out", "some where"])

    def make(accuracies=(0.5, 0.75, 0.6, 0.75), parameters=(1000, 1020), **changes):
        plan = make_plan(**changes)
        runs = make_runs(plan, tmp_path)
        for run, accuracy in zip(runs, accuracies, strict=False):
            leave(run, accuracy=accuracy, loss=2 * accuracy, parameters=parameters[list(plan.arms).index(run.arm)])
        return collect("mine", plan, [], runs)

    return make
