"""`tost cat`, `tost cp` and `tost validate`: configurations. Loads no torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tost.cli import _console
from tost.cli._arguments import Config, Overrides
from tost.errors import ConfigError


def cat(config: Config, overrides: Overrides = None) -> None:
    """Show a configuration, complete and explained."""
    from tost.recipes import load_config
    from tost.train.config import config_hash, dump_config

    changes = overrides or []
    settings = load_config(config, changes)
    # The heading is a comment: the output is itself a configuration file.
    _console.show(f"# {shlex.join([config, *changes])}, resolved; hash {config_hash(settings)}")
    _console.show(dump_config(settings).removesuffix("\n"))


def validate(config: Config, overrides: Overrides = None) -> None:
    """Check a configuration; list all problems, exit 2 if any."""
    from tost.recipes import load_config
    from tost.train.config import config_hash

    settings = load_config(config, overrides or [])
    _console.show(
        f"ok  {config}: {settings.recipe}, {settings.model.name} on {settings.data.name}, "
        f"{settings.train.steps} steps of {settings.train.batch_size}, hash {config_hash(settings)}"
    )


def cp(
    config: Config,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="New file, or a folder to put it in.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Copy a configuration to a file of your own."""
    from tost.recipes import find_config

    source = find_config(config)
    target = dest / source.name if dest.is_dir() else dest
    if not target.parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist; make it first, or give another destination")
    try:
        content = source.read_bytes()
        if force and target.exists() and target.samefile(source):
            raise ConfigError(f"{target} is the file to be copied; give another destination")
        # Mode "x" checks and creates in one step, so no file that appears in between is lost.
        with target.open("wb" if force else "xb") as file:
            file.write(content)
    except FileExistsError:
        raise ConfigError(f"{target} exists and was left as it is; add --force to replace it") from None
    except OSError as error:
        raise ConfigError(f"cannot copy {config} to {target}: {error.strerror} ({error.filename})") from None
    _console.show(f"{target}  copied from {config}; edit it, then: tost train {target}")
