"""The page of results: a section for every stored sweep, and text with its numbers filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add, mul, sub, truediv
from typing import Any

from tost._text import closest, count
from tost.errors import ConfigError
from tost.sweep import Plan, measured_tables, statements, table
from tost.sweep.summary import has_best

__all__ = ["fill", "page", "section"]

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

_OPERATIONS: dict[str, Callable[[float, float], float]] = {"+": add, "-": sub, "*": mul, "/": truediv}
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_HAND_TYPED = re.compile(r"\d+\.\d+|\d+(?:\.\d+)? ?%")


def section(results: Mapping[str, Any], commentary: str = "") -> str:
    """Return the section of a page about one sweep, in Markdown.

    Args:
        results: What `tost.sweep.collect` gathered.
        commentary: Text with placeholders, see `fill`.

    Raises:
        ConfigError: A placeholder is wrong, or a number was typed by hand.
    """
    plan = Plan.model_validate(results["plan"])
    parts = [f"## {plan.title.removesuffix('.')}", f"```shell\n{shlex.join(results['command'])}\n```"]
    parts += [table(results).markdown(), " ".join(statements(results))]
    parts += [shown.markdown() for shown in measured_tables(results)]
    if plan.states:
        parts.append(f"![{plan.metric} over the size of the state](img/{results['name']}.svg)")
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
    done = [run for run in results["runs"] if run["status"] == "finished"]
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
    ``parameters``, ``steps``, ``samples``, ``seconds``, ``state_bytes``, ``reference``, or a metric (or ``best``) and
    ``mean``, ``std``, ``min`` or ``max``; a metric that the plan measures with other settings is ``METRIC_NAME``;
    ``levels.NAME`` is a level of the plan. Two names may be joined by
    ``+ - * /`` with spaces around it, as in ``{tost.top1.mean - vit.top1.mean:+.1f}``. Double braces stand for braces.

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
    plan = Plan.model_validate(results["plan"])
    yield from ((f"levels.{name}", value) for name, value in plan.levels.items())
    for name, found in results["arms"].items():
        for key in ("parameters", "steps", "samples", "seconds", "state_bytes"):
            yield f"{name}.{key}", found.get(key)
        yield f"{name}.reference", plan.arms[name].reference
        spreads = {**found["metrics"], **({"best": found["best"]} if has_best(found, plan) else {})}
        for metric, spread in spreads.items():
            shown = plan.shown if metric in (plan.metric, "best", *map(plan.measured_as, plan.measure)) else 1.0
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
