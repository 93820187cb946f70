"""`tost eval`: measure a model on its validation set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tost._io import writing
from tost._text import Table
from tost.cli import _console
from tost.cli._arguments import Device, Ema, Json, Overrides
from tost.errors import ConfigError
from tost.train.evaluate import Protocol, TextTest

if TYPE_CHECKING:
    from tost.train.evaluate.metrics import Evaluation


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CKPT|CONFIG",
            help="A run folder, one of its checkpoints, or a configuration whose train.init_from names the weights.",
        ),
    ],
    overrides: Overrides = None,
    ema: Ema = False,
    protocol: Annotated[
        Protocol | None,
        typer.Option(
            help="How a language model is measured on the validation text: blocks side by side, sliding windows, the "
            "authors' random windows, one stream; or last words of passages (LAMBADA)."
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a window.", show_default="as trained, data.options.length")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between sliding windows.", show_default="half a window")
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Windows that --protocol authors draws.", show_default="16000, or what fits into the text"
        ),
    ] = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write evaluation.json and the confusion matrix to.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure a trained model on its validation set."""
    numbers = {"length": length, "stride": stride, "windows": windows}
    given = [f"--{name}" for name, value in numbers.items() if value is not None]
    if given and protocol is None:
        raise ConfigError(f"{', '.join(given)} given without --protocol, which chooses how a text is measured; add it.")
    test = None if protocol is None else TextTest(protocol=protocol, **numbers)
    found = _measure(source, overrides or [], test, device, ema=ema)
    if not _console.is_first():
        return
    metrics = [(name, f"{value:.6g}") for name, value in found.metrics.items()]
    for table in (Table(headers=("metric", "value"), rows=metrics), *found.details.tables):
        _console.print_table(table)
    if out is not None:
        with writing(out):
            files = found.write(out)
        for file in files:
            _console.show(str(file))
    if json:
        _console.show_json(found.content())


def _measure(source: str, overrides: list[str], test: TextTest | None, device: Device, *, ema: bool) -> Evaluation:
    from tost.recipes import list_configs, load_config
    from tost.train.checkpoint.files import resolve_checkpoint
    from tost.train.evaluate.metrics import evaluate_checkpoint, evaluate_initial

    path = Path(source)
    with _console.progress() as progress:
        report = progress.update
        if path.exists() and path.suffix not in (".yaml", ".yml"):
            checkpoint = resolve_checkpoint(path, _console.log)
            return evaluate_checkpoint(
                checkpoint, overrides=overrides, ema=ema, test=test, device=device, report=report
            )
        try:
            config = load_config(source, overrides)
        except ConfigError as error:
            if path.exists() or source in list_configs():
                raise
            raise ConfigError(f"there is no run or checkpoint {source}; {error}") from None
        if ema:
            raise ConfigError("--ema takes the average that a run has kept; name the run, or leave it out.")
        return evaluate_initial(config, test=test, device=device, report=report)
