"""Summarize a sweep: a table, statements computed from the results, and commentary with numbers filled in."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import add, mul, sub, truediv
from statistics import fmean
from typing import Any

from tost._text import Table, closest, count
from tost.errors import ConfigError
from tost.sweep.plan import Plan

INTRODUCTION = """# Results

Every table on this page is made by `scripts/update_results.py` from the stored results of a sweep (`results/*.json`),
and so are the numbers in the text. A sweep trains all its arms with all its seeds and gathers what came out:

```console
$ tost ls sweeps
$ tost sweep vision_cifar10 data.path=DATA --out runs/cifar10 --jobs 2 --threads 1
$ tost sweep vision_cifar10 data.path=DATA --out runs/cifar10 --store results/vision_cifar10.json
$ python scripts/update_results.py
```

The same command goes on where an interrupted sweep stopped, and leaves alone what is finished. What is said about a
sweep stands in `results/NAME.md` beside its `results/NAME.json`, with placeholders such as `{arm.metric.mean:.1f}` for
the numbers. "±" is the sample standard deviation over the seeds.
"""
EMPTY = "No results are stored yet."

_UNKNOWN = "-"
_OPERATIONS: dict[str, Callable[[float, float], float]] = {"+": add, "-": sub, "*": mul, "/": truediv}
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_HAND_TYPED = re.compile(r"\d+\.\d+|\d+(?:\.\d+)? ?%")


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
    headers = ["arm", "parameters", "steps", "seeds", metric, "best", *(["reported"] if has_reference else [])]
    rows = []
    for name, arm in plan.arms.items():
        found = results["arms"][name]
        row = [name, _count(found["parameters"]), _count(found["steps"]), f"{len(found['seeds'])}"]
        row += [_mean(found, plan), _best(found, plan)]
        if has_reference:
            row.append(_UNKNOWN if arm.reference is None else f"{arm.reference:g}")
        rows.append(row)
    return Table(headers=headers, rows=rows, title=plan.title)


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
        if any(value is not None for value in reported.values()):
            numbers = [*(reported.get(task) for task in plan.tasks), *averages(reported, plan)[: len(sizes)]]
            rows.append([f"{setting}, reported", *map(_two_decimals, numbers)])
    headers = ["setting", *plan.tasks, *(f"mean of {size}" for size in sizes)]
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
    missing = [f"{run['arm']}/seed{run['seed']} ({run['status']})" for run in results["runs"] if not _is_done(run)]
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
        at_any_step = any(_has_best(found, plan) for found in done.values())
        best = "evaluation of any seed, chosen on the data that it is measured on" if at_any_step else "seed"
        said.append(f"The {plan.metric} is that of the last step; best is that of the best {best}.")
    if plan.levels:
        levels = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in plan.levels.items())
        said.append(f"Without learning: {levels}.")
    if plan.levels or any(arm.reference is not None for arm in plan.arms.values()):
        said.append(f"Reported: {plan.source.removesuffix('.')}.")
    return said


def _plan(results: Mapping[str, Any]) -> Plan:
    return Plan.model_validate(results["plan"])


def _is_done(run: Mapping[str, Any]) -> bool:
    return bool(run["status"] == "finished")


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"


def _mean(found: Mapping[str, Any], plan: Plan) -> str:
    spread = found["metrics"].get(plan.metric)
    return _spread(spread, partial(_number, plan=plan, like=spread["mean"] if spread else None))


def _best(found: Mapping[str, Any], plan: Plan) -> str:
    spread = found["best"] if _has_best(found, plan) else found["metrics"].get(plan.metric)
    return _UNKNOWN if spread is None else _number(spread[plan.mode], plan)


def _has_best(found: Mapping[str, Any], plan: Plan) -> bool:
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
    groups: dict[tuple[Any, Any], list[str]] = {}
    for name, found in arms.items():
        groups.setdefault((found["steps"], found["samples"]), []).append(name)

    def length(steps: int | None, samples: int | None) -> str:
        if steps is None or samples is None:
            return "differing steps"
        return f"{steps:,} steps of {samples // steps:,} samples"

    if len(groups) == 1:
        ((key, _),) = groups.items()
        return f"Every{scope} run takes {length(*key)}."
    parts = [f"{', '.join(names)} {length(*key)}" for key, names in groups.items()]
    return f"The arms differ in length: {'; '.join(parts)}."


def section(results: Mapping[str, Any], commentary: str = "") -> str:
    """Return the section of a page about one sweep, in Markdown.

    Args:
        results: What `tost.sweep.collect` gathered.
        commentary: Text with placeholders, see `fill`.

    Raises:
        ConfigError: A placeholder is wrong, or a number was typed by hand.
    """
    plan = _plan(results)
    parts = [f"## {plan.title.removesuffix('.')}", f"```shell\n{shlex.join(results['command'])}\n```"]
    parts += [table(results).markdown(), " ".join(statements(results))]
    if notes := [f"- `{name}`: {arm.note}" for name, arm in plan.arms.items() if arm.note]:
        parts.append("\n".join(notes))
    if commentary.strip():
        parts.append(fill(commentary.strip(), results))
    parts.append(f"*{_provenance(results)}*")
    return "\n\n".join(parts)


def page(sections: Sequence[str]) -> str:
    """Return the page that shows all stored sweeps."""
    return "\n\n".join([INTRODUCTION.strip(), *(sections or [EMPTY])]) + "\n"


def _provenance(results: Mapping[str, Any]) -> str:
    done = [run for run in results["runs"] if _is_done(run)]
    machines = dict.fromkeys(_machine(run["machine"]) for run in done if run["machine"])
    revisions = dict.fromkeys(str(run["revision"]) for run in done if run["revision"])
    parts = [" and ".join(machines) or "machine unknown"]
    parts += [f"revision {' and '.join(revisions)}"] if revisions else []
    days = [run["finished"][:10] for run in done if run["finished"]]
    return ", ".join([*parts, max(days, default=results["collected"][:10])]) + "."


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']}, {count(machine['threads'], 'thread')}, torch {machine['torch']}, tost {machine['tost']}"


def fill(text: str, results: Mapping[str, Any]) -> str:
    """Return a text with its placeholders replaced by numbers of a sweep.

    A placeholder is ``{arm.metric.mean:.1f}``: a name, and how Python formats the number. After an arm come
    ``parameters``, ``steps``, ``samples``, ``seconds``, ``reference``, or a metric (or ``best``) and ``mean``, ``std``,
    ``min`` or ``max``; ``levels.NAME`` is a level of the plan. Two names may be joined by ``+ - * /`` with spaces
    around it, as in ``{tost.top1.mean - vit.top1.mean:+.1f}``. Double braces stand for braces.

    Args:
        text: Markdown.
        results: What `tost.sweep.collect` gathered.

    Raises:
        ConfigError: A name is unknown, its value is, or a number in the text was typed by hand.
    """
    _refuse_typed_numbers(text)
    values = dict(_values(results))

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        expression, _, form = match[1].partition(":")
        try:
            return format(_evaluate(expression.strip(), values), form)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{match[0]}: {error}; write for example {{{expression}:.1f}}") from None

    return _PLACEHOLDER.sub(replace, text)


def _refuse_typed_numbers(text: str) -> None:
    prose = re.sub(r"`[^`]*`", "", _PLACEHOLDER.sub("", text))
    if found := _HAND_TYPED.search(prose):
        raise ConfigError(
            f"the number {found[0]} was typed by hand; use a placeholder such as {{arm.metric.mean:.1f}}, or put what "
            "is no result between backquotes"
        )


def _values(results: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield every number that a text may name, as it is shown."""
    plan = _plan(results)
    yield from ((f"levels.{name}", value) for name, value in plan.levels.items())
    for name, found in results["arms"].items():
        for key in ("parameters", "steps", "samples", "seconds"):
            yield f"{name}.{key}", found[key]
        yield f"{name}.reference", plan.arms[name].reference
        spreads = {**found["metrics"], **({"best": found["best"]} if _has_best(found, plan) else {})}
        for metric, spread in spreads.items():
            shown = plan.shown if metric in (plan.metric, "best") else 1.0
            for key in ("mean", "std", "min", "max"):
                value = spread[key] if spread else None
                yield f"{name}.{metric}.{key}", None if value is None else value * shown


def _evaluate(expression: str, values: Mapping[str, float | None]) -> float:
    parts = re.split(r"\s+([-+*/])\s+", expression)
    if len(parts) == 1:
        return _look_up(expression, values)
    if len(parts) > 3:
        raise ConfigError(f"{{{expression}}}: at most two names can be joined")
    left, sign, right = parts
    divisor = _look_up(right, values)
    if sign == "/" and divisor == 0:
        raise ConfigError(f"{{{expression}}}: {right} is 0")
    return _OPERATIONS[sign](_look_up(left, values), divisor)


def _look_up(name: str, values: Mapping[str, float | None]) -> float:
    if name not in values:
        close = closest(name, values)
        meant = f"did you mean {close}?" if close else f"the names look like {next(iter(values))}"
        raise ConfigError(f"{{{name}}}: there is no such number in the results; {meant}")
    value = values[name]
    if value is None:
        raise ConfigError(f"{{{name}}}: the results do not have it; finish the runs, or take it out of the text")
    return value
