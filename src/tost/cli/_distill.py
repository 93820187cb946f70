"""`tost distill`: replace the attention of a pretrained model by TSSA and teach it what the original does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated

import typer

from tost.cli import _console
from tost.cli._arguments import Json
from tost.errors import ConfigError

INTERRUPTED = 130


def distill(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model of transformers, or its name.")],
    data: Annotated[str, typer.Option(help="File or folder with text; lines, or rows of jsonl, csv, parquet.")],
    out: Annotated[Path, typer.Option(help="Folder for the new model.")],
    layers: Annotated[str, typer.Option(help="Layers to replace, such as 0,1,-1.")] = "all",
    column: Annotated[str, typer.Option(help="Column of the text.")] = "text",
    length: Annotated[int, typer.Option(min=2, help="Longest document in tokens.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per step.")] = 32,
    layer_steps: Annotated[int, typer.Option(min=0, help="Steps that match block by block.")] = 200,
    output_steps: Annotated[int, typer.Option(min=0, help="Steps that match logits or hidden states.")] = 200,
    lr: Annotated[float, typer.Option(help="Highest learning rate of the first stage.")] = 1e-3,
    output_lr: Annotated[float, typer.Option(help="Highest learning rate of the second stage.")] = 2e-4,
    seed: Annotated[int, typer.Option(help="Seed of the order of documents.")] = 0,
    json: Json = False,
) -> None:
    """Replace the attention of a pretrained model by TSSA, and train it to do what the original does.

    First each block learns to return what the original block returns, then the model learns to return the original's
    logits, or its hidden states. The result is read by tost.integrations.replace.saved.load_replaced. Ctrl-C ends the
    training and keeps what is there.
    """
    places = _places(layers)
    if out.exists():
        raise ConfigError(f"{out} exists and was left as it is; give another place with --out")
    from tost.integrations.distill import Progress, TextBatches, compare, load_teacher
    from tost.integrations.distill import distill as train
    from tost.integrations.replace import replace_attention

    teacher, tokenizer = load_teacher(model)
    texts = TextBatches(data, tokenizer, column=column, batch_size=batch_size, length=length, seed=seed)
    student = replace_attention(copy.deepcopy(teacher), layers=places)
    count = min(8, -(-len(texts.held_out) // batch_size))
    before = compare(teacher, student, texts.held_out_batches(), count)
    progress, interrupted = Progress(), False
    try:
        train(
            teacher,
            student,
            iter(texts),
            layer_steps=layer_steps,
            output_steps=output_steps,
            lr=lr,
            output_lr=output_lr,
            report=_console.log,
            progress=progress,
        )
    except KeyboardInterrupt:
        interrupted = True
        _console.log("interrupted; the model is written as it is now")
    after = compare(teacher, student, texts.held_out_batches(), count)
    student.save_pretrained(out)
    tokenizer.save_pretrained(out)
    rows = [
        ("model", model),
        ("layers", layers),
        ("documents", f"{len(texts.train):,} and {len(texts.held_out):,} held out"),
        ("distance before", f"{before:.4f}"),
        ("distance after", f"{after:.4f}"),
        ("written", str(out)),
    ]
    _console.show_table(("distilled", ""), rows)
    if json:
        losses = {"layer_losses": progress.layers, "output_losses": progress.outputs}
        _console.show_json({"model": model, "out": str(out), "before": before, "after": after, **losses})
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _places(layers: str) -> list[int] | None:
    if layers == "all":
        return None
    try:
        return [int(place) for place in layers.split(",")]
    except ValueError as error:
        raise ConfigError(f"--layers {layers} is not understood; write all, or numbers such as 0,1,-1") from error
