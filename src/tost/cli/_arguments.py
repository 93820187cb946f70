"""Arguments that several commands share, and which code outside tost they allow to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tost._text import did_you_mean
from tost.cli import _console
from tost.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

_NAMES = ("recipe", "model.name", "model.mixer", "data.name")
"""Keys whose value may be ``package.module:object``."""


def _allow_typed(overrides: list[str] | None) -> list[str] | None:
    """Allow the packages of foreign names among overrides."""
    pairs = (text.partition("=") for text in overrides or ())
    if typed := [name for key, _, name in pairs if key in _NAMES and ":" in name]:
        from tost._plugins import allow_typed

        allow_typed(*typed)
    return overrides


def _find_source(source: Path) -> Path:
    """Return the folder of a pretrained model for its name, and other paths as they are."""
    from tost.pretrained import find_pretrained, list_pretrained

    name = str(source)
    return find_pretrained(name).folder if name in list_pretrained() and not source.exists() else source


Config = Annotated[str, typer.Argument(metavar="CONFIG", help="Built-in configuration or YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, such as train.steps=100.", callback=_allow_typed),
]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|CKPT|MODEL",
        help="A run, checkpoint or model folder, or a name of `tost ls pretrained`.",
        callback=_find_source,
    ),
]
Ema = Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where; auto takes a GPU if there is one.")]


def load_source(source: Path, *, ema: bool, changes: Mapping[str, Any] | None = None) -> nn.Module:
    """Return the model of a run, checkpoint or model folder, in evaluation mode.

    Args:
        source: The folder.
        ema: Take the moving averages of the weights.
        changes: Options of the model that differ from those it was saved with.
    """
    from tost.pretrained import WEIGHTS, list_pretrained, load_pretrained
    from tost.train.checkpoint.model import build_saved, read_saved

    if not source.exists():
        raise CheckpointError(
            f"there is no {source}; {did_you_mean(str(source), list_pretrained())}give a run folder, one of its "
            "checkpoints, a model folder, or a name of `tost ls pretrained`"
        )
    if source.parent == WEIGHTS and not ema and not changes:
        return load_pretrained(source.name)
    saved = read_saved(source, ema=ema, report=_console.log)
    return build_saved(saved, str(source), changes)
