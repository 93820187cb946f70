"""`tost ls`: what there is to use, by name. Only `ls ops` loads torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from tost.cli import _console

__all__ = ["Kind", "ls"]

Entry = dict[str, str]


class Kind(StrEnum):
    """What can be listed."""

    RECIPES = "recipes"
    CONFIGS = "configs"
    SWEEPS = "sweeps"
    MODELS = "models"
    MIXERS = "mixers"
    DATA = "data"
    OPS = "ops"
    ANALYSES = "analyses"


def ls(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="What to list.")] = Kind.CONFIGS,
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Which names, with the wildcards of a shell, such as 'demo/*'.")
    ] = "*",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """List recipes, configurations, sweeps, models, mixers, data sets, operators or analyses.

    A table on a terminal; in a pipe one line per entry, its columns separated by tabs, the name first.
    """
    entries = _LISTS[kind](pattern)
    if json:
        _console.show_json({"kind": kind, "entries": entries})
    elif not entries:
        _console.log(
            f"there are no {kind} yet" if pattern == "*" else f"no {kind} match {pattern!r}; `tost ls {kind}` lists all"
        )
    elif sys.stdout.isatty():
        _console.show_table(list(entries[0]), [list(entry.values()) for entry in entries])
    else:
        for entry in entries:
            _console.show("\t".join(entry.values()))


def _recipes(pattern: str) -> list[Entry]:
    from tost.recipes import find_recipe, list_recipes

    return [{"name": name, "description": find_recipe(name).description} for name in list_recipes(pattern)]


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
    from tost.data import find_data, list_data

    specs = [find_data(name) for name in list_data(pattern)]
    return [{"name": spec.name, "recipe": spec.task or "any", "description": spec.description} for spec in specs]


def _ops(pattern: str) -> list[Entry]:
    from tost.ops import available_backends, operators

    names = sorted(name for name in operators() if fnmatchcase(name, pattern))
    ready = {name: [key for key, status in available_backends(name).items() if status == "ready"] for name in names}
    return [{"name": name, "backends": ", ".join(ready[name])} for name in names]


def _analyses(pattern: str) -> list[Entry]:
    from tost.analysis.registry import describe_analyses

    return [{"name": name, "description": summary} for name, summary in describe_analyses(pattern)]


_LISTS: dict[Kind, Callable[[str], list[Entry]]] = {
    Kind.RECIPES: _recipes,
    Kind.CONFIGS: _configs,
    Kind.SWEEPS: _sweeps,
    Kind.MODELS: _models,
    Kind.MIXERS: _mixers,
    Kind.DATA: _data,
    Kind.OPS: _ops,
    Kind.ANALYSES: _analyses,
}
