"""`tost cat`: a configuration as it will be used, every key with its meaning. Loads no torch."""

from __future__ import annotations

import shlex

from tost.cli import _console
from tost.cli._arguments import Config, Overrides


def cat(config: Config, overrides: Overrides = None) -> None:
    """Show a configuration, complete and explained."""
    from tost.recipes import load_config
    from tost.train.config import config_hash, dump_config

    changes = overrides or []
    settings = load_config(config, changes)
    # The heading is a comment: the output is itself a configuration file.
    _console.show(f"# {shlex.join([config, *changes])}, resolved; hash {config_hash(settings)}")
    _console.show(dump_config(settings).removesuffix("\n"))
