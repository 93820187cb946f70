"""`tost eval`: measure a model on its validation set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tost.cli import _console
from tost.cli._arguments import Overrides
from tost.cli._reporter import is_first
from tost.train.evaluate.protocol import Protocol, TextTest

if TYPE_CHECKING:
    from tost.train.evaluate.metrics import Evaluation

_NO_AVERAGE = "--ema takes the average that a run has kept; name the run, or leave it out."


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CKPT|CONFIG",
            help="A run folder, one of its checkpoints, or a configuration whose train.init_from names the weights.",
        ),
    ],
    overrides: Overrides = None,
    ema: Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")] = False,
    protocol: Annotated[
        Protocol | None,
        typer.Option(
            help="How a language model is measured on the validation text: blocks side by side, sliding windows, the "
            "authors' random windows, one stream; last words of passages (LAMBADA), or choices (CBT)."
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a window.", show_default="as trained, data.options.length")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between sliding windows.", show_default="half a window")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Windows that --protocol authors draws.", show_default="16000")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write evaluation.json and the confusion matrix to.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Measure a trained model on its validation set."""
    if protocol is None:
        _refuse_without_protocol(length=length, stride=stride, windows=windows)
        found = _measure(source, overrides or [], ema=ema)
    else:
        numbers = {"length": length, "stride": stride, "windows": windows}
        found = _measure_text(source, overrides or [], protocol, numbers, ema=ema)
    if not is_first():
        return
    _console.show_table(
        ("metric", "value"), [(name, f"{value:.6g}") for name, value in found.metrics.items()], labels=1
    )
    for table in found.details.tables:
        _console.show_table(table.headers, table.rows, title=table.title, labels=table.labels)
    if out is not None:
        for file in found.write(out):
            _console.show(str(file))
    if json:
        _console.show_json(found.content())


def _measure(source: str, overrides: list[str], *, ema: bool) -> Evaluation:
    from tost.errors import ConfigError
    from tost.recipes import get_task, load_config
    from tost.train.checkpoint.files import resolve_checkpoint
    from tost.train.evaluate.metrics import evaluate_checkpoint, evaluate_initial

    if _is_saved(source):
        checkpoint = resolve_checkpoint(Path(source), _console.log)
        return evaluate_checkpoint(checkpoint, get_task, overrides=overrides, ema=ema)
    config = load_config(source, overrides)
    if ema:
        raise ConfigError(_NO_AVERAGE)
    return evaluate_initial(config, get_task(config.recipe))


def _measure_text(
    source: str, overrides: list[str], protocol: Protocol, numbers: Mapping[str, int | None], *, ema: bool
) -> Evaluation:
    from tost.errors import ConfigError
    from tost.recipes import load_config
    from tost.train.checkpoint.files import resolve_checkpoint
    from tost.train.evaluate.text import evaluate_text_checkpoint, evaluate_text_initial

    test = TextTest(protocol=protocol, **numbers)
    if _is_saved(source):
        checkpoint = resolve_checkpoint(Path(source), _console.log)
        return evaluate_text_checkpoint(checkpoint, test, overrides=overrides, ema=ema)
    if ema:
        raise ConfigError(_NO_AVERAGE)
    return evaluate_text_initial(load_config(source, overrides), test)


def _is_saved(source: str) -> bool:
    path = Path(source)
    return path.exists() and path.suffix not in (".yaml", ".yml")


def _refuse_without_protocol(**numbers: int | None) -> None:
    from tost.errors import ConfigError

    if given := [f"--{name}" for name, value in numbers.items() if value is not None]:
        raise ConfigError(f"{', '.join(given)} given without --protocol, which chooses how a text is measured; add it.")
