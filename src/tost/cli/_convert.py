"""`tost convert`: the authors' checkpoints into models of this package, and back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tost._io import atomic_path
from tost._text import byte_size
from tost.cli import _console
from tost.cli._arguments import Json
from tost.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from torch import nn

Form = Literal["tost", "official"]
"""Whose code reads the result."""

Weights = Literal["model", "ema"]
"""Which weights of the source are taken."""

_SIZES = ("embed_dim", "depth", "num_heads", "mixer", "patch_size", "num_classes", "vocab_size", "max_length")


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A checkpoint file of the authors, or a run, checkpoint or model folder."
        ),
    ],
    out: Annotated[Path, typer.Option(help="What to write: a folder (tost) or a file such as model.pth (official).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options that the file does not contain, such as num_heads=6."),
    ] = None,
    to: Annotated[Form | None, typer.Option(help="Form to write. Default: the other one than that of SOURCE.")] = None,
    weights: Annotated[Weights, typer.Option(help="ema: the moving average of the weights.")] = "model",
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    json: Json = False,
) -> None:
    """Convert weights between the authors' code and this package.

    Files are read without running anything in them, and every tensor is accounted for.
    """
    form = to or ("official" if source.is_dir() else "tost")
    _check_target(source, out, form, force=force)
    name, model = _read(source, overrides or [], weights)
    if form == "tost":
        from tost.data.text.tokenizers import save_tokenizer
        from tost.train.checkpoint.model import save_model
        from tost.train.tokenizer import find_tokenizer

        tokenizer = find_tokenizer(source) if source.is_dir() else None
        add = None if tokenizer is None else partial(save_tokenizer, tokenizer)
        save_model(model, out, name=name, force=force, add=add)
    else:
        import torch

        from tost.integrations.official import to_official

        content = {"model": to_official(model)}
        try:
            with atomic_path(out) as draft:
                torch.save(content, draft)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
            raise StorageError(f"cannot write {out}: {error}") from error
    options: dict[str, Any] = model.options.model_dump(mode="json")  # type: ignore[union-attr,operator]
    parameters = sum(p.numel() for p in model.parameters())
    size = sum(file.stat().st_size for file in (out.iterdir() if out.is_dir() else [out]))
    rows = [
        *(("source", str(source)), ("model", name)),
        *((key, str(options[key])) for key in _SIZES if key in options),
        ("parameters", f"{parameters:,}"),
        ("written", f"{out}, {byte_size(size)}, for {'the code of the authors' if form == 'official' else 'tost'}"),
    ]
    _console.show_table(("converted", ""), rows)
    if json:
        summary = {"source": str(source), "out": str(out), "form": form, "model": name, "options": options}
        _console.show_json({**summary, "parameters": parameters, "bytes": size})


def _check_target(source: Path, out: Path, form: Form, *, force: bool) -> None:
    """Raise a ConfigError before any work if `out` cannot be written or would lose a file."""
    if out.exists() and source.exists() and out.samefile(source):
        raise ConfigError(f"{out} is the source itself; give another place with --out")
    if form == "tost":
        from tost.train.checkpoint.model import refuse_existing

        refuse_existing(out, force=force)
    elif not out.absolute().parent.is_dir():
        raise ConfigError(f"the folder {out.parent} does not exist; make it first, or give another place with --out")
    elif out.is_dir() or out.suffix == ".safetensors":
        example = out / "model.pth" if out.is_dir() else out.with_suffix(".pth")
        raise ConfigError(
            f"the authors' code reads PyTorch files only; {out} is none, write for example --out {example}"
        )
    elif out.exists() and not force:
        raise ConfigError(f"{out} exists and was left as it is; add --force to replace it")


def _read(source: Path, overrides: list[str], weights: Weights) -> tuple[str, nn.Module]:
    """Return the registered name and the model of a folder of this package or a file of the authors."""
    from tost.train.checkpoint.model import build_saved, nearest_name, read_saved

    if source.is_dir():
        if overrides:
            raise ConfigError(f"{overrides[0]}: a folder of this package has all options of its model; leave it out")
        saved = read_saved(source, ema=weights == "ema", report=_console.log)
        return saved.name, build_saved(saved, str(source))
    from tost._yaml import parse_value
    from tost.integrations.official import load_official

    options: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{text!r} is not an option of a model; write key=value, for example num_heads=8")
        if key in options:
            raise ConfigError(f"{key} is given twice; keep one of the two")
        options[key] = parse_value(value)
    model = load_official(source, weights=weights, **options)
    return nearest_name(model.options), model  # type: ignore[arg-type]
