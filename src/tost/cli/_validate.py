"""`tost validate`: is this configuration usable, and if not, what is wrong with it. Loads no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from tost.cli import _console

__all__ = ["validate"]


def validate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Built-in configuration or YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as train.steps=100.")
    ] = None,
) -> None:
    """Check a configuration; list all problems, exit 2 if any."""
    from tost.recipes import load_config
    from tost.train.config import config_hash

    settings = load_config(config, overrides or [])
    _console.show(
        f"ok  {config}: {settings.recipe}, {settings.model.name} on {settings.data.name}, "
        f"{settings.train.steps} steps of {settings.train.batch_size}, hash {config_hash(settings)}"
    )
