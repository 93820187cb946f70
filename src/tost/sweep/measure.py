"""Evaluate the runs of a sweep once more, with other settings than they were trained with, such as longer samples."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from pydantic import BaseModel, ConfigDict, ValidationError

from tost._io import write_json
from tost._progress import Report, silent
from tost.sweep.plan import Plan
from tost.sweep.runs import Run, State, chosen_trial, state_of
from tost.train.history import read_record

MEASURED = "measured.json"
"""In a run folder: for every name of ``measure`` in the plan its changes, and the metrics that they led to."""


class _Measured(BaseModel):
    """An entry of that file."""

    model_config = ConfigDict(frozen=True, strict=True)

    changes: list[str]
    metrics: dict[str, float | None]


def measure_runs(plan: Plan, runs: Sequence[Run], report: Report = silent) -> None:
    """Evaluate what the plan asks for and the run folders do not hold yet.

    Only runs that count are looked at: finished ones, with the value that their arm chose of what is tuned. What was
    measured is stored at once, so that an interrupted call loses one evaluation at most.

    Args:
        plan: The plan.
        runs: Runs of the sweep.
        report: Receives how many evaluations are done, of how many.

    Raises:
        ConfigError: The data or the model cannot be built with these changes.
        CheckpointError: The weights of a run cannot be read.
    """
    due = [(run, name) for run in runs if _counts(plan, run, runs) for name in plan.measure]
    due = [(run, name) for run, name in due if name not in read_measured(plan, run)]
    if not due:
        return
    from tost.recipes import get_task
    from tost.train.checkpoint.files import resolve_checkpoint
    from tost.train.evaluate.metrics import evaluate_checkpoint

    for done, (run, name) in enumerate(due):
        report(done, len(due))
        checkpoint = resolve_checkpoint(run.folder.absolute(), lambda line: None)
        changes = plan.measure[name]
        found = evaluate_checkpoint(checkpoint, get_task, overrides=changes, ema=False).metrics
        metrics = {metric: value if isfinite(value) else None for metric, value in found.items()}
        entry = _Measured(changes=changes, metrics=metrics)
        write_json(run.folder / MEASURED, {**read_record(run.folder / MEASURED), name: entry.model_dump()})


def read_measured(plan: Plan, run: Run) -> dict[str, dict[str, float | None]]:
    """Return the metrics of a run for each name of ``measure`` that was evaluated with the changes of the plan."""
    found = {}
    for name, entry in read_record(run.folder / MEASURED).items():
        try:
            measured = _Measured.model_validate(entry)
        except ValidationError:  # damaged, so it is measured again
            continue
        if measured.changes == plan.measure.get(name):
            found[name] = measured.metrics
    return found


def _counts(plan: Plan, run: Run, runs: Sequence[Run]) -> bool:
    if state_of(run) is not State.finished:
        return False
    return plan.tune is None or run.trial == chosen_trial(plan, run.arm, runs)
