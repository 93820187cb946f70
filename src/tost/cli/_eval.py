"""`tost eval`: measure a checkpoint on its validation set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tost.cli import _console

__all__ = ["evaluate"]


def evaluate(
    source: Annotated[Path, typer.Argument(metavar="RUN|CKPT", help="A run folder or one of its checkpoints.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as evaluate.batch_size=8.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Measure a trained model on its validation set."""
    from tost.recipes import get_task
    from tost.train.checkpoint import resolve_checkpoint
    from tost.train.evaluate import evaluate_checkpoint

    checkpoint = resolve_checkpoint(source, _console.log)
    metrics = evaluate_checkpoint(checkpoint, get_task, overrides=overrides or [], ema=ema)
    _console.show_table(("metric", "value"), [(name, f"{value:.6g}") for name, value in metrics.items()], labels=1)
    if json:
        _console.show_json(dict(metrics))
