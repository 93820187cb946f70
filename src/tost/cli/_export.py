"""`tost export`: a trained model for ONNX Runtime or OpenVINO."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tost._text import byte_size, number
from tost.cli import _console
from tost.cli._arguments import Ema, Json, Overrides, Source, load_source
from tost.errors import ConfigError

if TYPE_CHECKING:
    from tost.data import DataBundle
    from tost.train.config import RunConfig

Format = Literal["onnx", "openvino"]


def export(
    source: Source,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    overrides: Overrides = None,
    to: Annotated[Format, typer.Option(help="Runtime to export for.")] = "onnx",
    image_size: Annotated[
        str | None,
        typer.Option(metavar="PX|HxW", help="Size of the images.", show_default="any, where the model allows it"),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantize to 8 bits, on the training data of the run or on --data.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Inputs to quantize on, arrays by name such as images.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples to quantize on.")] = 256,
    opset: Annotated[int, typer.Option(help="Version of the ONNX operator set.")] = 20,
    ema: Ema = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    json: Json = False,
) -> None:
    """Write a trained model for ONNX Runtime or OpenVINO, with a runner that needs no torch.

    Changes of the run's configuration, such as data.path=DIR, name other data to quantize and measure on.
    """
    if data is not None and not int8:
        raise ConfigError("--data is what to quantize on; add --int8, or leave it out.")
    if overrides and (data is not None or not int8):
        raise ConfigError(
            f"{overrides[0]} changes the run's data, which only --int8 without --data uses; leave it out."
        )
    size = None if image_size is None else _size(image_size)
    model = load_source(source, ema=ema)
    import tost
    from tost.deploy.graphs import describe
    from tost.deploy.measure import Served, file_batches, metrics_of, training_batches
    from tost.deploy.runtime import Model
    from tost.train.tokenizer import find_tokenizer

    config: RunConfig | None = None
    bundle: DataBundle | None = None
    calibration = None
    if data is not None:
        calibration = file_batches(data, samples)
    elif int8:
        config, bundle = _run_data(source, overrides or [])
        calibration = training_batches(bundle, describe(model, size).inputs[0].name, samples)
    _console.log(f"exporting to {to}, and comparing with torch")
    done = tost.export(
        model,
        out,
        format=to,
        image_size=size,
        calibration=calibration,
        tokenizer=find_tokenizer(source),
        opset=opset,
        force=force,
    )
    rows = [
        *(("folder", str(done.folder)), ("model", done.kind), ("format", f"{done.format}, {done.precision}")),
        *(("size", byte_size(done.bytes)), ("largest difference from torch", f"{done.error:.2g}")),
    ]
    metrics: dict[str, dict[str, float]] = {}
    if config is not None and bundle is not None:
        _console.log("measuring the validation set before and after")
        metrics = {
            "before": metrics_of(model, config, bundle),
            "after": metrics_of(Served(Model(out)), config, bundle),
        }
        rows += [
            (name, f"{number(value)} before, {number(metrics['after'][name])} after")
            for name, value in metrics["before"].items()
        ]
    _console.show_table(("exported", ""), rows)
    if json:
        _console.show_json({**asdict(done), "folder": str(done.folder), **({"metrics": metrics} if metrics else {})})


def _size(text: str) -> int | tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(f"--image-size {text} is no size; write for example 224, or 224x320 for height and width.")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _run_data(source: Path, overrides: list[str]) -> tuple[RunConfig, DataBundle]:
    """Return the configuration and the data of the run that a model comes from."""
    from tost.recipes import load_config
    from tost.train.checkpoint.files import resolve_checkpoint
    from tost.train.registry import get_task

    path = resolve_checkpoint(source, _console.log).parents[1] / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{source} is not a run, so it has no data to quantize on; give inputs with --data FILE.npz.")
    config = load_config(path, [*overrides, "evaluate.telemetry=false"])
    return config, get_task(config.recipe).build_data(config)
