"""`tost analyze`: measure and draw what the layers of a trained model do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tost._plugins import allow_typed
from tost._text import integers
from tost.analysis.registry import ALL, describe_analyses, find_analysis
from tost.cli import _console
from tost.cli._arguments import Ema, Json, Source, load_source
from tost.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from tost.analysis import Samples


def analyze(
    source: Source,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which analysis, or all that apply; listed above.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="analysis, in the run folder")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers by number, such as 0,4,-1.", show_default="all, or what is usual")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each split.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples at once; decides memory, not results.")] = 16,
    images: Annotated[
        list[Path] | None, typer.Option(help="Image file or folder to take instead of the run's; can be repeated.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file to take instead of the run's.")] = None,
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Measure an untrained model beside it (coding-rate).")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Weights of the untrained model.")] = 0,
    ema: Ema = False,
    json: Json = False,
) -> None:
    """Look inside a trained model; the list of analyses is added below."""
    allow_typed(name)
    if name != ALL:
        find_analysis(name)  # a mistake is found before anything is loaded
    chosen = None if layers is None else integers(layers)
    if layers is not None and chosen is None:
        raise ConfigError(f"--layers {layers} are no numbers; write for example --layers 0,4,-1")
    model = load_source(source, ema=ema)
    config, home = _find_run(source)
    from tost import analysis

    if name != ALL:
        analysis.require(model, name)
    names = analysis.applicable(model) if name == ALL else [name]
    if not names:
        raise ConfigError(
            f"no analysis applies to {type(model).__name__}: it has neither TSSA layers nor a class token"
        )
    gathered = analysis.Samples()
    if any(find_analysis(each).data for each in names):
        gathered = _gather(model, config, images or [], text, samples, batch_size)
    compares = control and any(find_analysis(each).accepts("control") for each in names)
    fresh = analysis.control_of(model, seed=seed) if compares else None
    folder = out or home / "analysis"
    found: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    with _console.progress(len(names)) as progress:
        for each in names:
            progress.start(each)
            try:
                result = analysis.analyze(each, model, gathered, layers=chosen, control=fresh)
            except ConfigError as error:
                if name != ALL:
                    raise
                skipped[each] = str(error)
                progress.finish(f"left out: {error}")
                continue
            if isinstance(result, analysis.MembershipMaps) and chosen is not None:  # a picture for each chosen layer
                parts = [(result.at(layer), f"{result.name}-layer{layer:02d}") for layer in result.layers]
                files = [file for part, stem in parts for file in analysis.save(part, folder, stem)]
            else:
                files = analysis.save(result, folder)
            found[each] = {"summary": result.summary(), "files": [str(file) for file in files]}
            progress.finish(f"{len(files)} files")
    rows = [(each, key, str(value)) for each, part in found.items() for key, value in part["summary"].items()]
    _console.show_table(("analysis", "what", "value"), rows, labels=2)
    _console.show(str(folder))
    if json:
        _console.show_json({"out": str(folder), "results": found, "skipped": skipped})


analyze.__doc__ = "\n".join(
    [
        "Look inside a trained model: numbers on the screen; pictures (PNG, SVG) and data (JSON, CSV) in a folder.",
        "",
        "\b",
        "Analyses:",
        *("  {name:<17} {description}".format_map(entry) for entry in describe_analyses()),
        f"  {ALL:<17} all that apply to the model",
    ]
)


def _find_run(source: Path) -> tuple[Path | None, Path]:
    """Return the configuration of the run that a model comes from, if it has one, and the folder that it belongs to."""
    from tost.train.checkpoint.files import resolve_checkpoint

    checkpoint = resolve_checkpoint(source, lambda line: None)
    config = checkpoint.parents[1] / "config.yaml"
    is_run = config.is_file() and not (checkpoint / "model.json").is_file()
    home = source if (source / "checkpoints").is_dir() else checkpoint.parents[1] if is_run else Path()
    return config if is_run else None, home


def _gather(
    model: nn.Module, config: Path | None, images: list[Path], text: Path | None, count: int, batch_size: int
) -> Samples:
    from tost.report.samples import image_samples, run_samples, text_samples

    if images and text is not None:
        raise ConfigError("--images and --text are both given; a model takes one of the two.")
    if images:
        return image_samples(model, config, images, count=count, batch_size=batch_size)
    if text is not None:
        return text_samples(model, config, text, count=count, batch_size=batch_size)
    if config is None:
        raise ConfigError(
            "a model folder does not say which data it was trained on; add --images FOLDER or --text FILE, or name a "
            "run folder."
        )
    return run_samples(config, count=count, batch_size=batch_size)
