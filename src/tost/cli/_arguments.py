"""Arguments that several commands share, and which code outside tost they allow to run."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Config", "Overrides", "Plugins"]

_NAMES = ("recipe", "model.name", "model.mixer", "data.name")
"""Keys whose value may be ``package.module:object``."""


def _allow(packages: list[str] | None) -> list[str] | None:
    if packages:
        from tost._plugins import allow

        allow(*packages)
    return packages


def _allow_typed(overrides: list[str] | None) -> list[str] | None:
    """Allow the packages of foreign names among overrides: whoever types a name on the command line wants its code."""
    typed = [text.partition("=")[2] for text in overrides or () if text.partition("=")[0] in _NAMES]
    if any(":" in name for name in typed):
        from tost._plugins import allow, is_foreign

        allow(*(name.partition(":")[0].partition(".")[0] for name in typed if is_foreign(name)))
    return overrides


Config = Annotated[str, typer.Argument(metavar="CONFIG", help="Built-in configuration or YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, such as train.steps=100.", callback=_allow_typed),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="PACKAGE",
        help="Let tost import this package, which registers models, data sets or tasks. Can be repeated.",
        callback=_allow,
    ),
]
