"""`tost validate`: is this configuration usable, and if not, what is wrong with it. Loads no torch."""

from __future__ import annotations

from tost.cli import _console
from tost.cli._arguments import Config, Overrides


def validate(config: Config, overrides: Overrides = None) -> None:
    """Check a configuration; list all problems, exit 2 if any."""
    from tost.recipes import load_config
    from tost.train.config import config_hash

    settings = load_config(config, overrides or [])
    _console.show(
        f"ok  {config}: {settings.recipe}, {settings.model.name} on {settings.data.name}, "
        f"{settings.train.steps} steps of {settings.train.batch_size}, hash {config_hash(settings)}"
    )
