"""Summarize a sweep: a table, and statements computed from the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Any

from tost._text import Table, grouped
from tost.sweep.plan import Plan

_UNKNOWN = "-"


def table(results: Mapping[str, Any]) -> Table:
    """Return the table of a sweep: one row per arm; over several tasks, one row per setting and one column per task.

    Args:
        results: What `tost.sweep.collect` gathered.
    """
    plan = _plan(results)
    if plan.tasks:
        return _task_table(results, plan)
    has_reference = any(arm.reference is not None for arm in plan.arms.values())
    metric = plan.metric + (" %" if plan.percent else "")
    headers = ["arm", "parameters", "steps", "seeds", metric, "best"]
    headers += ["state, bytes"] if plan.states else []
    headers += [plan.tune.key] if plan.tune else []
    headers += ["reported"] if has_reference else []
    rows = []
    for name, arm in plan.arms.items():
        found = results["arms"][name]
        row = [name, _count(found["parameters"]), _count(found["steps"]), f"{len(found['seeds'])}"]
        row += [_mean(found, plan), _best(found, plan)]
        row += [_count(found["state_bytes"])] if plan.states else []
        if plan.tune:
            row.append((found["trial"] or "").partition("=")[2] or _UNKNOWN)
        if has_reference:
            row.append(_UNKNOWN if arm.reference is None else f"{arm.reference:g}")
        rows.append(row)
    return Table(headers=headers, rows=rows, title=plan.title)


def measured_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return what the arms reach with the changes that the plan measures them with; over several tasks, one table each.

    Args:
        results: What `tost.sweep.collect` gathered.
    """
    plan = _plan(results)
    if not plan.measure:
        return []
    headers = ["as trained", *plan.measure]
    metrics = [plan.metric, *map(plan.measured_as, plan.measure)]

    def row(arm: str) -> list[str]:
        found = [results["arms"][arm]["metrics"].get(metric) for metric in metrics]
        return [
            _spread(spread, partial(_number, plan=plan, like=spread["mean"])) if spread else _UNKNOWN
            for spread in found
        ]

    tables = []
    for task in plan.tasks or [""]:
        arms = {plan.task_of(arm)[1]: arm for arm in plan.arms if plan.task_of(arm)[0] == task}
        rows = [[setting, *row(arm)] for setting, arm in arms.items()]
        tables.append(Table(headers=[task or "arm", *headers], rows=rows))
    return tables


def averages(values: Mapping[str, float | None], plan: Plan) -> tuple[float | None, float | None]:
    """Return two averages over tasks.

    Published tables of the Long-Range Arena mix two averages: over five tasks, and over six with a failed Path-X
    counted at chance. Both are shown, for what was measured and for what was reported.

    Args:
        values: What was reached, by task, as it is shown; None for a task without a result.
        plan: Plan with the tasks, which of them are extra, and what guessing reaches.

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


def _task_table(results: Mapping[str, Any], plan: Plan) -> Table:
    """Return a row per setting, below it one with what was reported for it, if anything; averages on the right."""
    core = sum(not task.extra for task in plan.tasks.values())
    sizes = dict.fromkeys([core, len(plan.tasks)])
    rows = []
    for setting in dict.fromkeys(plan.task_of(arm)[1] for arm in plan.arms):
        arms = {task: f"{task}_{setting}" for task in plan.tasks if f"{task}_{setting}" in plan.arms}
        found = {task: results["arms"][arm]["metrics"].get(plan.metric) for task, arm in arms.items()}
        means = {task: spread["mean"] * plan.shown for task, spread in found.items() if spread}
        reported = {task: plan.arms[arm].reference for task, arm in arms.items()}
        cells = [_spread(found.get(task), partial(_two_decimals, scale=plan.shown)) for task in plan.tasks]
        rows.append([setting, *cells, *map(_two_decimals, averages(means, plan)[: len(sizes)])])
        if plan.states:
            states = {results["arms"][arm]["state_bytes"] for arm in arms.values()}
            rows[-1].append(_count(states.pop()) if len(states) == 1 else _UNKNOWN)
        if any(value is not None for value in reported.values()):
            numbers = [*(reported.get(task) for task in plan.tasks), *averages(reported, plan)[: len(sizes)]]
            rows.append([f"{setting}, reported", *map(_two_decimals, numbers), *([""] if plan.states else [])])
    headers = ["setting", *plan.tasks, *(f"mean of {size}" for size in sizes)]
    headers += ["state, bytes"] if plan.states else []
    return Table(headers=headers, rows=rows, title=plan.title)


def _two_decimals(value: float | None, scale: float = 1.0) -> str:
    return _UNKNOWN if value is None else f"{value * scale:.2f}"


def _spread(spread: Mapping[str, float | None] | None, write: Callable[[float], str]) -> str:
    """Write mean and standard deviation, if there are any."""
    if spread is None or spread["mean"] is None:
        return _UNKNOWN
    text = write(spread["mean"])
    return text if spread["std"] is None else f"{text} ± {write(spread['std'])}"


def _task_statement(plan: Plan) -> str:
    """Explain the two averages; empty if they are one."""
    extra = {name: task.chance for name, task in plan.tasks.items() if task.extra}
    if not extra:
        return ""
    core = len(plan.tasks) - len(extra)
    levels = ", ".join(f"{name} at {chance:g}" for name, chance in extra.items())
    return (
        f"The mean of {core} leaves out {', '.join(extra)}; the mean of {len(plan.tasks)} counts it, and where there "
        f"is no result counts it at chance ({levels}). Published averages are of either kind."
    )


def statements(results: Mapping[str, Any]) -> list[str]:
    """Return, computed from the results, how far the arms can be compared: runs, parameters, steps, machine.

    Args:
        results: What `tost.sweep.collect` gathered.
    """
    plan = _plan(results)
    said = []
    missing = [
        f"{run['arm']}/seed{run['seed']} ({run['status']})" for run in results["runs"] if run["status"] != "finished"
    ]
    if missing:
        said.append(f"Not finished: {', '.join(missing)}.")
    done = {name: found for name, found in results["arms"].items() if found["seeds"]}
    if len(done) > 1 and not plan.tasks:
        scope = "" if len(done) == len(plan.arms) else " finished"
        said.append(_compare_parameters({name: found["parameters"] for name, found in done.items()}, scope))
        said.append(_compare_steps(done, scope))
    if plan.tasks:
        said += [f"The {plan.metric} is that of the last step.", *filter(None, [_task_statement(plan)])]
    elif done:
        at_any_step = any(has_best(found, plan) for found in done.values())
        best = "evaluation of any seed, chosen on the data that it is measured on" if at_any_step else "seed"
        said.append(f"The {plan.metric} is that of the last step; best is that of the best {best}.")
    if plan.states:
        said.append("The state is what the mixers of all layers keep of one sample; - where a mixer has none.")
    if plan.measure:
        columns = "; ".join(f"{name} with {', '.join(changes)}" for name, changes in plan.measure.items())
        said.append(f"The weights of the last step were also measured with other settings: {columns}.")
    if plan.levels:
        levels = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in plan.levels.items())
        said.append(f"Without learning: {levels}.")
    if plan.levels or any(arm.reference is not None for arm in plan.arms.values()):
        said.append(f"Reported: {plan.source.removesuffix('.')}.")
    return said


def _plan(results: Mapping[str, Any]) -> Plan:
    return Plan.model_validate(results["plan"])


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"


def _mean(found: Mapping[str, Any], plan: Plan) -> str:
    spread = found["metrics"].get(plan.metric)
    return _spread(spread, partial(_number, plan=plan, like=spread["mean"] if spread else None))


def _best(found: Mapping[str, Any], plan: Plan) -> str:
    spread = found["best"] if has_best(found, plan) else found["metrics"].get(plan.metric)
    return _UNKNOWN if spread is None else _number(spread[plan.mode], plan)


def has_best(found: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether the runs of an arm kept the best value of the plan's metric, and not of another one."""
    return found["best"] is not None and found["best_metric"] == plan.metric


def _number(value: float, plan: Plan, like: float | None = None) -> str:
    """Return a value with the decimals that four digits of `like` take, or of the value itself."""
    if plan.percent:
        return f"{value * plan.shown:.2f}"
    size = abs(value if like is None else like)
    digits = 3 - math.floor(math.log10(size)) if 1e-6 < size < math.inf else 3
    return f"{value:.{max(0, digits)}f}"


def _compare_parameters(counts: Mapping[str, int | None], scope: str) -> str:
    known = {name: count for name, count in counts.items() if count is not None}
    if len(known) < len(counts):
        return "The seeds of an arm differ in their number of parameters."
    least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    if known[least] == known[most]:
        return f"All{scope} arms have {known[most]:,} parameters."
    bounds = " to ".join(f"{known[name]:,} ({name})" for name in (least, most))
    return f"Parameters of{scope or ' all'} arms: {bounds}, {known[most] / known[least] - 1:.1%} apart."


def _compare_steps(arms: Mapping[str, Mapping[str, Any]], scope: str) -> str:
    groups = grouped(arms, lambda name: (arms[name]["steps"], arms[name]["samples"]))

    def length(steps: int | None, samples: int | None) -> str:
        if steps is None or samples is None:
            return "differing steps"
        return f"{steps:,} steps of {samples // steps:,} samples"

    if len(groups) == 1:
        ((key, _),) = groups.items()
        return f"Every{scope} run takes {length(*key)}."
    parts = [f"{', '.join(names)} {length(*key)}" for key, names in groups.items()]
    return f"The arms differ in length: {'; '.join(parts)}."
