"""Kinds of training, and the configurations that come with the package. Importing this package loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tost.recipes._registry import (
        RecipeSpec,
        config_summary,
        find_config,
        find_recipe,
        get_task,
        list_configs,
        list_recipes,
        load_config,
    )

__all__ = [
    "RecipeSpec",
    "config_summary",
    "find_config",
    "find_recipe",
    "get_task",
    "list_configs",
    "list_recipes",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tost.recipes' has no attribute {name!r}")
    value = getattr(import_module("tost.recipes._registry"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
