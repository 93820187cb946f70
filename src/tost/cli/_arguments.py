"""Arguments that several commands share, and which code outside tost they allow to run."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Config", "Overrides"]

_NAMES = ("recipe", "model.name", "model.mixer", "data.name")
"""Keys whose value may be ``package.module:object``."""


def _allow_typed(overrides: list[str] | None) -> list[str] | None:
    """Allow the packages of foreign names among overrides."""
    pairs = (text.partition("=") for text in overrides or ())
    if typed := [name for key, _, name in pairs if key in _NAMES and ":" in name]:
        from tost._plugins import allow_typed

        allow_typed(*typed)
    return overrides


Config = Annotated[str, typer.Argument(metavar="CONFIG", help="Built-in configuration or YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, such as train.steps=100.", callback=_allow_typed),
]
