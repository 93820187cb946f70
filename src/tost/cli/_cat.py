"""`tost cat`: a configuration as it will be used, every key with its meaning. Loads no torch."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from tost.cli import _console

__all__ = ["cat"]


def cat(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Built-in configuration or YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as train.steps=100.")
    ] = None,
) -> None:
    """Show a configuration, complete and explained."""
    from tost.recipes import load_config
    from tost.train.config import config_hash, dump_config

    changes = overrides or []
    settings = load_config(config, changes)
    # The heading is a comment: the output is itself a configuration file.
    _console.show(f"# {shlex.join([config, *changes])}, resolved; hash {config_hash(settings)}")
    _console.show(dump_config(settings).removesuffix("\n"))
