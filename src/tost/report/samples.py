"""A run's model and a few of its samples: what is needed to look into it. Loads torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tost.analysis import Samples
from tost.data import Dataset, make_evaluation_loader, tokenizer_of
from tost.data.image_options import ImageOptions
from tost.recipes import get_task, load_config
from tost.train.checkpoint import resolve_checkpoint
from tost.train.config import RunConfig
from tost.train.saved import build_saved, read_saved

if TYPE_CHECKING:
    from tost.data.text_tokenizer import DataTokenizer

__all__ = ["Opened", "open_run"]

SAMPLES = 64
"""Samples of each split that are looked at, unless they are long."""
TOKENS = 16_384
"""Tokens of each split that are looked at, at most."""
TEXT = 200
"""Tokens of the text whose memberships are shown."""
_BATCH = 16
# What a control character or half a letter is drawn as.
_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class Opened:
    """A run that can be looked into.

    Attributes:
        model: Its newest model, in evaluation mode.
        samples: What to look at.
        checkpoint: Where the weights are from.
        config: Its settings.
        tokenizer: What its ids mean; None for other things than text.
        count: How many samples of the validation set there are in `samples`.
    """

    model: nn.Module
    samples: Samples
    checkpoint: Path
    config: RunConfig
    tokenizer: DataTokenizer | None
    count: int


def open_run(
    folder: Path, *, count: int = SAMPLES, ema: bool = False, report: Callable[[str], None] | None = None
) -> Opened:
    """Read the newest model of a run, and the first samples of its data.

    Args:
        folder: The run folder, or one of its checkpoints.
        count: Samples of each split, at most; fewer if they are long.
        ema: Take the moving average of the weights.
        report: Told about newer checkpoints that are damaged and passed over.

    Raises:
        CheckpointError: There is no usable checkpoint.
        ConfigError: The configuration cannot be used here any more, or the data is not there.
    """
    checkpoint = resolve_checkpoint(folder, report or (lambda line: None))
    model = build_saved(read_saved(checkpoint, ema=ema), str(folder)).eval()
    config = load_config(str(checkpoint.parents[1] / "config.yaml"))
    bundle = get_task(config.recipe).build_data(config)
    train, validation = (_batches(dataset, count) for dataset in (bundle.train, bundle.validation))
    tokenizer = _tokenizer(config)
    text = None if tokenizer is None or not validation else _text(validation[0]["inputs"], tokenizer)
    samples = Samples(train=train, validation=validation, pixels=_pixels(validation, config), text=text)
    return Opened(model, samples, checkpoint, config, tokenizer, sum(len(batch["inputs"]) for batch in validation))


def _batches(dataset: Dataset, count: int) -> list[dict[str, Tensor]]:
    """Return the first samples in small batches, so that the memory for looking at them stays small."""
    first = dataset[0]["inputs"]
    positions = first.numel() if not first.is_floating_point() else first[..., 0].numel()
    fitting = min(count, len(dataset), max(1, TOKENS // max(1, positions)))
    size = min(fitting, _BATCH)
    batches = islice(make_evaluation_loader(dataset, batch_size=size), -(-fitting // size))
    return [{key: value for key, value in batch.items() if key in ("inputs", "mask")} for batch in batches]


def _pixels(batches: list[dict[str, Tensor]], config: RunConfig) -> Tensor | None:
    """Return images as they look: before the data set took their mean and divided by their deviation."""
    options = config.data.data_set_options()
    if not isinstance(options, ImageOptions) or not batches:
        return None
    images = torch.cat([batch["inputs"] for batch in batches])
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (options.mean, options.std))
    shown = (images * std + mean).clamp(0, 1)
    return shown.expand(-1, 3, -1, -1) if shown.shape[1] == 1 else shown


def _tokenizer(config: RunConfig) -> DataTokenizer | None:
    return tokenizer_of(config.data) if config.recipe == "language_modeling" else None


def _text(inputs: Tensor, tokenizer: DataTokenizer) -> tuple[Tensor, list[str]]:
    ids = inputs[:1, :TEXT]
    return ids, [_written(tokenizer.decode([token])) for token in ids[0].tolist()]


def _written(token: str) -> str:
    return "".join(
        _VISIBLE.get(letter, letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}") for letter in token
    )
