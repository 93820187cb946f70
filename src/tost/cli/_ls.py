"""`tost ls`: what there is to use, by name. Only `ls ops` loads torch."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tost.cli import _console

if TYPE_CHECKING:
    from tost._plugins import Registry

Entry = dict[str, str]
Kind = Literal["tasks", "configs", "sweeps", "models", "mixers", "data", "ops", "analyses"]
"""What can be listed."""


def ls(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="What to list.")] = "configs",
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Which names, with the wildcards of a shell, such as 'demo/*'.")
    ] = "*",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """List tasks, configurations, sweeps, models, mixers, data sets, operators or analyses.

    A table on a terminal; in a pipe one line per entry, its columns separated by tabs, the name first.
    """
    entries = _LISTS[kind](pattern)
    if json:
        _console.show_json({"kind": kind, "entries": entries})
    elif not entries:
        _console.log(
            f"there are no {kind} yet" if pattern == "*" else f"no {kind} match {pattern!r}; `tost ls {kind}` lists all"
        )
    else:
        _console.show_entries(entries)


def _tasks(pattern: str) -> list[Entry]:
    from tost.recipes.registry import TASKS

    return _registered(TASKS, pattern, lambda spec: {"description": spec.description})


def _configs(pattern: str) -> list[Entry]:
    from tost.recipes import config_summary, list_configs

    return [{"name": name, "description": config_summary(name)} for name in list_configs(pattern)]


def _sweeps(pattern: str) -> list[Entry]:
    from tost.sweep import list_plans, plan_summary

    return [{"name": name, "description": plan_summary(name)} for name in list_plans(pattern)]


def _models(pattern: str) -> list[Entry]:
    from tost.models.registry import describe_model, list_models

    return list(map(describe_model, list_models(pattern)))


def _mixers(pattern: str) -> list[Entry]:
    from tost.models.mixers import describe_mixer, list_mixers

    return list(map(describe_mixer, list_mixers(pattern)))


def _data(pattern: str) -> list[Entry]:
    from tost.data.registry import DATA_SETS

    return _registered(DATA_SETS, pattern, lambda spec: {"recipe": spec.task or "any", "description": spec.description})


def _registered(registry: Registry[Any], pattern: str, columns: Callable[[Any], Entry]) -> list[Entry]:
    """List a registry without importing the packages of entry points: these show their package only."""
    names = registry.names(pattern)
    known = {name: columns(spec) for name in names if (spec := registry.peek(name)) is not None}
    blank = dict.fromkeys(next(iter(known.values()), {"description": ""}), "-")
    foreign = {name: {**blank, "description": f"from {registry.origin(name)}"} for name in names if name not in known}
    return [{"name": name, **known.get(name, foreign.get(name, {}))} for name in names]


def _ops(pattern: str) -> list[Entry]:
    from tost.ops import available_backends, operators

    names = sorted(name for name in operators() if fnmatchcase(name, pattern))
    ready = {name: [key for key, status in available_backends(name).items() if status == "ready"] for name in names}
    return [{"name": name, "backends": ", ".join(ready[name])} for name in names]


def _analyses(pattern: str) -> list[Entry]:
    from tost.analysis.registry import describe_analyses

    return [{"name": name, "description": summary} for name, summary in describe_analyses(pattern)]


_LISTS: dict[Kind, Callable[[str], list[Entry]]] = {
    "tasks": _tasks,
    "configs": _configs,
    "sweeps": _sweeps,
    "models": _models,
    "mixers": _mixers,
    "data": _data,
    "ops": _ops,
    "analyses": _analyses,
}
