"""Kinds of training, and the configurations that come with the package. Importing this package loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tost._lazy import lazy

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "_registry": (
            "RecipeSpec",
            "config_summary",
            "find_config",
            "find_recipe",
            "get_task",
            "list_configs",
            "list_recipes",
            "load_config",
        ),
    },
)
