"""The table of a sweep over several tasks: a row per setting, a column per task, and the averages in both ways.

Published tables of the Long-Range Arena mix two averages: over five tasks, and over six with a failed Path-X counted
at chance. Both are shown here, for what was measured and for what was reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from tost.sweep.plan import Plan

__all__ = ["averages", "task_headers", "task_rows", "task_statement"]

_UNKNOWN = "-"


def averages(values: Mapping[str, float | None], plan: Plan) -> tuple[float | None, float | None]:
    """Return two averages over tasks.

    Args:
        values: What was reached, by task, as it is shown; None for a task without a result.
        plan: Says which tasks there are, which of them are extra, and what guessing reaches.

    Returns:
        The mean over the tasks that are not extra, and the mean over all with an extra task that has no result counted
        at chance. None where a task that is not extra has no result.
    """
    core = [values.get(name) for name, task in plan.tasks.items() if not task.extra]
    known = [value for value in core if value is not None]
    if not core or len(known) < len(core):
        return None, None
    extra = [(values.get(name), task.chance) for name, task in plan.tasks.items() if task.extra]
    return fmean(known), fmean([*known, *(chance if value is None else value for value, chance in extra)])


def task_headers(plan: Plan) -> list[str]:
    """Return the titles of the columns."""
    core = sum(not task.extra for task in plan.tasks.values())
    both = [f"mean of {core}", f"mean of {len(plan.tasks)}"]
    return ["setting", *plan.tasks, *(both if core < len(plan.tasks) else both[:1])]


def task_rows(results: Mapping[str, Any], plan: Plan) -> list[list[str]]:
    """Return a row per setting, and below it one with what was reported for it, if anything was.

    Args:
        results: What `tost.sweep.collect` gathered.
        plan: Its plan, which has tasks.
    """
    rows = []
    for setting in dict.fromkeys(plan.task_of(arm)[1] for arm in plan.arms):
        arms = {task: f"{task}_{setting}" for task in plan.tasks if f"{task}_{setting}" in plan.arms}
        found = {task: results["arms"][arm]["metrics"].get(plan.metric) for task, arm in arms.items()}
        means = {task: spread["mean"] * plan.shown for task, spread in found.items() if spread}
        cells = [_cell(found.get(task), plan) for task in plan.tasks]
        rows.append([setting, *cells, *_averaged(means, plan)])
        reported = {task: plan.arms[arm].reference for task, arm in arms.items()}
        if any(value is not None for value in reported.values()):
            cells = [_number(reported.get(task)) for task in plan.tasks]
            rows.append([f"{setting}, reported", *cells, *_averaged(reported, plan)])
    return rows


def task_statement(plan: Plan) -> str:
    """Say what the two averages are; empty if they are one."""
    extra = {name: task.chance for name, task in plan.tasks.items() if task.extra}
    if not extra:
        return ""
    core = len(plan.tasks) - len(extra)
    levels = ", ".join(f"{name} at {chance:g}" for name, chance in extra.items())
    return (
        f"The mean of {core} leaves out {', '.join(extra)}; the mean of {len(plan.tasks)} counts it, and where there "
        f"is no result counts it at chance ({levels}). Published averages are of either kind."
    )


def _averaged(values: Mapping[str, float | None], plan: Plan) -> list[str]:
    both = [_number(value) for value in averages(values, plan)]
    return both if any(task.extra for task in plan.tasks.values()) else both[:1]


def _cell(spread: Mapping[str, float | None] | None, plan: Plan) -> str:
    if spread is None or spread["mean"] is None:
        return _UNKNOWN
    text = _number(spread["mean"] * plan.shown)
    return text if spread["std"] is None else f"{text} ± {_number(spread['std'] * plan.shown)}"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}"
