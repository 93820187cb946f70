"""Small prepared folders of text, and language models trained on them for two steps."""

from __future__ import annotations

from pathlib import Path

from tost.data.prepare import prepare
from tost.recipes import get_task, load_config
from tost.train.loop import fit

TINY = ("model.embed_dim=16", "model.depth=1", "model.num_heads=2", "model.position=learned", "data.options.length=16")
STEPS = (
    "train.steps=2",
    "train.batch_size=4",
    "train.precision=fp32",
    "schedule.warmup_steps=1",
    "evaluate.every=2",
    "evaluate.batch_size=4",
)
VERSE = "the rose is red the violet blue and sugar is as sweet as you\n"


def write_text(folder: Path, name: str = "verse", **options: object) -> Path:
    """Prepare a short text; by default as bytes, a tenth of it for validation."""
    source = folder / f"{name}.txt"
    source.write_text(VERSE * 40)
    given = {"source": str(source), "tokenizer": "bytes", "split": "tail", "validation": 0.1, **options}
    prepare("text", given, folder / name)
    return folder / name


def write_passages(folder: Path, texts: list[str], **options: object) -> Path:
    """Prepare passages, one per line, as LAMBADA has them."""
    source = folder / "lambada_test.jsonl"
    source.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    prepare("lambada", {"source": str(source), "tokenizer": "bytes", **options}, folder / "passages")
    return folder / "passages"


def train(folder: Path, data: Path, *overrides: str) -> Path:
    """Train a tiny model for two steps; return the run folder."""
    config = load_config("small/wikitext2", [f"data.path={data}", *TINY, *STEPS, *overrides])
    fit(config, get_task(config.recipe), folder / "run")
    return folder / "run"
