"""Tables of stored results, and texts with their numbers filled in."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from operator import add, mul, sub, truediv
from statistics import fmean
from typing import Any

from research.plan import Plan
from research.results import Results, is_committed, read_results
from tost.errors import ConfigError

__all__ = ["averages", "fill", "markdown", "section", "table"]

UNKNOWN = "-"
DIRTY = " (uncommitted)"

_OPERATIONS: dict[str, Callable[[float, float], float]] = {"+": add, "-": sub, "*": mul, "/": truediv}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table with its headers in the first row; columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def section(results: Results) -> str:
    """Return the part of the page about one sweep."""
    plan = Plan.model_validate(results["plan"])
    machines = {f"{run['machine']['cpu']}, torch {run['machine']['torch']}" for run in results["runs"]}
    revisions = sorted({run["revision"] for run in results["runs"] if run["revision"]})
    steps = {f"{arm['steps']:,} x {arm['samples'] // arm['steps']}" for arm in results["arms"].values()}
    notes = [f"{' and '.join(sorted(machines))}; revision {', '.join(revisions)}; steps x samples {', '.join(steps)}."]
    if plan.levels:
        notes.append("Without learning: " + ", ".join(f"{name} {value:g}" for name, value in plan.levels.items()) + ".")
    if plan.levels or any(arm.reference is not None for arm in plan.arms.values()):
        notes.append(f"Reported: {plan.source.removesuffix('.')}.")
    parts = [f"## {results['name']}: {plan.title}", f"`{shlex.join(results['command'])}`", markdown(table(results))]
    parts += [markdown(shown) for shown in _measured(results, plan)]
    parts += ["\n".join(f"- `{name}`: {arm.note}" for name, arm in plan.arms.items() if arm.note)]
    return "\n\n".join(filter(None, [*parts, " ".join(notes)]))


def table(results: Results) -> list[list[str]]:
    """Return headers and rows: a row for each arm; over several tasks, a row for each setting."""
    plan = Plan.model_validate(results["plan"])
    if plan.tasks:
        return _over_tasks(results, plan)
    references = any(arm.reference is not None for arm in plan.arms.values())
    headers = ["arm", "parameters", "seeds", plan.metric + (" %" if plan.percent else "")]
    headers += ["state, bytes"] * plan.states + ([plan.tune.key] if plan.tune else []) + ["reported"] * references
    rows = [headers]
    for name, arm in plan.arms.items():
        found = results["arms"][name]
        row = [name + ("" if is_committed(results, name) else DIRTY)]
        row += [_count(found["parameters"]), str(len(found["seeds"])), _spread(found["metrics"].get(plan.metric), plan)]
        row += [_count(found["state_bytes"])] if plan.states else []
        row += [found["trial"].partition("=")[2]] if plan.tune else []
        row += [UNKNOWN if arm.reference is None else f"{arm.reference:g}"] if references else []
        rows.append(row)
    return rows


def _over_tasks(results: Results, plan: Plan) -> list[list[str]]:
    core = sum(not task.extra for task in plan.tasks.values())
    sizes = list(dict.fromkeys([core, len(plan.tasks)]))
    rows = [["setting", *plan.tasks, *(f"mean of {size}" for size in sizes)]]
    for setting in dict.fromkeys(plan.task_of(arm)[1] for arm in plan.arms):
        arms = {task: f"{task}_{setting}" for task in plan.tasks if f"{task}_{setting}" in plan.arms}
        spreads = {task: results["arms"][arm]["metrics"].get(plan.metric) for task, arm in arms.items()}
        means = {task: spread["mean"] * plan.scale for task, spread in spreads.items() if spread}
        reported = {task: plan.arms[arm].reference for task, arm in arms.items()}
        dirty = "" if all(is_committed(results, arm) for arm in arms.values()) else DIRTY
        numbers = [_number(mean, plan) for mean in averages(means, plan)[: len(sizes)]]
        rows.append([setting + dirty, *(_spread(spreads.get(task), plan) for task in plan.tasks), *numbers])
        if any(value is not None for value in reported.values()):
            values = [*map(reported.get, plan.tasks), *averages(reported, plan)[: len(sizes)]]
            rows.append([f"{setting}, reported", *(_number(value, plan) for value in values)])
    return rows


def averages(values: Mapping[str, float | None], plan: Plan) -> tuple[float | None, float | None]:
    """Return the mean over tasks that are not extra, and that over all with extra ones without a result at chance.

    Published tables of the Long-Range Arena are of either kind. Both are None where another task has no result.

    Args:
        values: Shown metric by task.
        plan: Plan with the tasks.
    """
    core = [values.get(name) for name, task in plan.tasks.items() if not task.extra]
    known = [value for value in core if value is not None]
    if not known or len(known) < len(core):
        return None, None
    extra = [(values.get(name), task.chance) for name, task in plan.tasks.items() if task.extra]
    return fmean(known), fmean([*known, *(chance if value is None else value for value, chance in extra)])


def _measured(results: Results, plan: Plan) -> list[list[list[str]]]:
    """Return a table of metrics under the changes of ``measure`` for each task."""
    metrics = [plan.metric, *(f"{plan.metric}_{name}" for name in plan.measure)]
    shown = []
    for task in (plan.tasks or [""]) if plan.measure else []:
        rows = [[task or "arm", "as trained", *plan.measure]]
        for arm in plan.arms:
            if plan.task_of(arm)[0] == task:
                found = results["arms"][arm]["metrics"]
                rows.append([plan.task_of(arm)[1], *(_spread(found.get(metric), plan) for metric in metrics)])
        shown.append(rows)
    return shown


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _number(value: float | None, plan: Plan, like: float | None = None) -> str:
    """Write a shown value: percentages with two decimals, others with four digits of `like` or of the value."""
    if value is None:
        return UNKNOWN
    size = abs(value if like is None else like)
    digits = 2 if plan.percent else max(0, 3 - math.floor(math.log10(size)) if size else 3)
    return f"{value:.{digits}f}"


def _spread(spread: Mapping[str, float | None] | None, plan: Plan) -> str:
    """Write mean and sample standard deviation of a stored metric."""
    if spread is None or spread["mean"] is None:
        return UNKNOWN
    mean = spread["mean"] * plan.scale
    text = _number(mean, plan)
    return text if spread["std"] is None else f"{text} ± {_number(spread['std'] * plan.scale, plan, like=mean)}"


def fill(text: str) -> str:
    """Replace the placeholders of a text by numbers of stored results.

    ``{FILE: ARM.METRIC.mean:.2f}`` is a value of results/FILE.json, and after the colon how Python writes it. After an
    arm come ``parameters``, ``state_bytes`` or a metric with ``mean``, ``std``, ``min`` or ``max``; ``levels.NAME`` is
    a level of the plan. Two values are joined by ``+ - * /`` between spaces. Braces without a colon stay.

    Raises:
        ConfigError: A placeholder has no such value, or its runs are of a revision that was not committed.
    """

    def replace(match: re.Match[str]) -> str:
        file, expression, form = (part.strip() for part in match.groups())
        results = read_results(file)
        first, *rest = re.split(r"\s+([-+*/])\s+", expression)
        value = _value(results, first)
        if rest:
            value = _OPERATIONS[rest[0]](value, _value(results, rest[1]))
        return format(value, form)

    return re.sub(r"\{(\w+): ([^{}:]+):([^{}]*)\}", replace, text)


def _value(results: Results, name: str) -> float:
    plan = Plan.model_validate(results["plan"])
    arm, *path = name.split(".")
    if arm == "levels":
        return plan.levels[path[0]]
    try:
        found: Any = results["arms"][arm]
        for key in ["metrics", *path] if len(path) > 1 else path:
            found = found[key]
    except (KeyError, TypeError):
        raise ConfigError(f"{results['name']}.json has no {name}") from None
    if not is_committed(results, arm):
        raise ConfigError(f"{results['name']}.json: the runs of {arm} are of a revision that was not committed")
    return found * plan.scale if len(path) > 1 and path[0].startswith(plan.metric) else found
