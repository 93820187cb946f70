"""`tost ls`: names of configurations, models, data sets and more. Only `ls ops` loads torch."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tost._lazy import load
from tost.cli import _console
from tost.errors import ConfigError

if TYPE_CHECKING:
    from tost._plugins import Registry

Entry = dict[str, str]
Kind = Literal["tasks", "configs", "models", "mixers", "data", "ops", "analyses", "pretrained", "runs"]
"""What can be listed."""


def ls(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="What to list.")] = "configs",
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN|DIR",
            help="Which names, with the wildcards of a shell, such as 'demo/*'; for runs, the folder to search.",
            show_default="all; for runs, this folder",
        ),
    ] = "*",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """List tasks, configurations, models, mixers, data sets, operators, analyses, pretrained models or runs.

    A table on a terminal; in a pipe one line per entry, its columns separated by tabs, the name first.
    """
    entries = _LISTS[kind](pattern)
    if json:
        _console.show_json({"kind": kind, "entries": entries})
    elif entries:
        _console.show_entries(entries)
    elif pattern == "*" or kind == "runs":
        _console.log(f"there are no {kind} yet")
    else:
        _console.log(f"no {kind} match {pattern!r}; `tost ls {kind}` lists all")


def _described(names: str, describe: str, pattern: str) -> list[Entry]:
    found = [(name, load(describe)(name)) for name in load(names)(pattern)]
    return [each if isinstance(each, dict) else {"name": name, "description": each} for name, each in found]


def _registered(registry: str, pattern: str) -> list[Entry]:
    found: Registry[Any] = load(registry)
    return [found.describe(name) for name in found.names(pattern)]


def _runs(folder: str) -> list[Entry]:
    from tost.report.runs import as_cells, find_runs, read_runs, summarize

    place = Path() if folder == "*" else Path(folder)
    if not place.is_dir():
        raise ConfigError(f"there is no folder {place}; give one that holds runs")
    return [as_cells(summarize(run)) for run in read_runs(find_runs(place))]


def _ops(pattern: str) -> list[Entry]:
    from tost.ops import available_backends, operators

    names = sorted(name for name in operators() if fnmatchcase(name, pattern))
    ready = {name: [key for key, status in available_backends(name).items() if status == "ready"] for name in names}
    return [{"name": name, "backends": ", ".join(ready[name])} for name in names]


# What is listed is imported when it is asked for.
_LISTS: dict[Kind, Callable[[str], list[Entry]]] = {
    "tasks": partial(_registered, "tost.train.registry:TASKS"),
    "configs": partial(_described, "tost.recipes:list_configs", "tost.recipes:config_summary"),
    "models": partial(_registered, "tost.models.registry:MODELS"),
    "mixers": partial(_registered, "tost.models.mixers:MIXERS"),
    "data": partial(_registered, "tost.data.registry:DATA_SETS"),
    "ops": _ops,
    "analyses": lambda pattern: load("tost.analysis:describe_analyses")(pattern),
    "pretrained": partial(_described, "tost.pretrained:list_pretrained", "tost.pretrained:describe_pretrained"),
    "runs": _runs,
}
