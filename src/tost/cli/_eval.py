"""`tost eval`: measure a model on its validation set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tost.cli import _console
from tost.cli._reporter import is_first

if TYPE_CHECKING:
    from tost.train.evaluate import Evaluation

__all__ = ["evaluate"]


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CKPT|CONFIG",
            help="A run folder, one of its checkpoints, or a configuration whose train.init_from names the weights.",
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as evaluate.batch_size=8.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write evaluation.json and the confusion matrix to.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Measure a trained model on its validation set."""
    found = _measure(source, overrides or [], ema=ema)
    if not is_first():
        return
    _console.show_table(
        ("metric", "value"), [(name, f"{value:.6g}") for name, value in found.metrics.items()], labels=1
    )
    for table in found.report.tables:
        _console.show_table(table.headers, table.rows, title=table.title, labels=table.labels)
    if out is not None:
        for file in found.write(out):
            _console.show(str(file))
    if json:
        _console.show_json(found.content())


def _measure(source: str, overrides: list[str], *, ema: bool) -> Evaluation:
    from tost.errors import ConfigError
    from tost.recipes import get_task, load_config
    from tost.train.checkpoint import resolve_checkpoint
    from tost.train.evaluate import evaluate_checkpoint, evaluate_start

    path = Path(source)
    if path.exists() and path.suffix not in (".yaml", ".yml"):
        return evaluate_checkpoint(resolve_checkpoint(path, _console.log), get_task, overrides=overrides, ema=ema)
    config = load_config(source, overrides)
    if ema:
        raise ConfigError("--ema takes the average that a run has kept; name the run, or leave it out.")
    return evaluate_start(config, get_task(config.recipe))
