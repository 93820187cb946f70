"""A run's model and some of its samples: what is needed to look into it. Loads torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import torch
from torch import Tensor, nn

from tost.analysis import Samples
from tost.data import Dataset, build_data
from tost.data.images.options import ImageOptions
from tost.data.text.tokenizers import DataTokenizer
from tost.recipes import load_config
from tost.train.checkpoint.files import resolve_checkpoint
from tost.train.checkpoint.model import build_saved, read_saved
from tost.train.config import RunConfig
from tost.train.tokenizer import find_tokenizer

__all__ = ["Batches", "Opened", "open_run", "pixels_of", "plain_config", "samples_of", "strings_of"]

SAMPLES = 64
"""Samples of each split that are looked at, unless they are long."""
TOKENS = 16_384
"""Tokens of each split that are looked at, at most."""
TEXT_TOKENS = 512
"""Tokens of the text whose memberships are shown, at most."""
_BATCH = 16
# The training images as they are: what augmentation does to them is no property of the model.
_PLAIN = ("crop=none", "flip=0.0", "auto_augment=null", "color_jitter=0.0", "erasing=0.0", "repeats=1")


@dataclass(frozen=True)
class Opened:
    """A run that can be looked into.

    Attributes:
        model: Its newest model, in evaluation mode.
        samples: What to look at.
        checkpoint: Where the weights are from.
        tokenizer: What its ids mean; None for other things than text, or if nobody knows.
        count: How many samples of each split there are in `samples`, at most.
    """

    model: nn.Module
    samples: Samples
    checkpoint: Path
    tokenizer: DataTokenizer | None
    count: int


class Batches:
    """Some samples of a data set, in batches that can be gone through again and again; one is held at a time.

    Args:
        dataset: The samples.
        count: How many, spread over the set and taken in leaps, because files are often sorted by class and the first
            few are drawn.
        batch_size: How many at once.
        options: What is known about images; their batches have ``"pixels"`` too, to be drawn.
    """

    def __init__(self, dataset: Dataset, count: int, batch_size: int, options: object = None) -> None:
        spread = torch.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().long()
        self.indices = spread[torch.arange(len(spread)) * _leap(len(spread)) % len(spread)]
        self.dataset, self.batch_size, self.options = dataset, batch_size, options

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(self.indices), self.batch_size):
            batch = self.dataset.gather(self.indices[start : start + self.batch_size])
            if isinstance(self.options, ImageOptions):
                batch = {**batch, "pixels": pixels_of(batch["inputs"], self.options)}
            yield batch


def _leap(count: int) -> int:
    """Return a step that visits all of `count` places, and spreads the first few of them: the golden section."""
    return next(step for step in range(max(1, round(0.618 * count)), 2 * count + 1) if gcd(step, count) == 1)


def plain_config(file: Path) -> RunConfig:
    """Read the configuration of a run, with images as they are: not cropped, mirrored or recoloured for training.

    Raises:
        ConfigError: It cannot be used here.
    """
    config = load_config(str(file))
    if not isinstance(config.data.data_set_options(), ImageOptions):
        return config
    return load_config(str(file), [f"data.options.{change}" for change in _PLAIN])


def samples_of(
    config: RunConfig, tokenizer: DataTokenizer | None, *, count: int = SAMPLES, batch_size: int = _BATCH
) -> Samples:
    """Return samples of both splits of a run's data, and a text of it if it has any.

    Args:
        config: The run's configuration, best as `plain_config` reads it.
        tokenizer: How ids are written.
        count: How many samples of each split.
        batch_size: How many at once.

    Raises:
        ConfigError: The data is not there any more.
    """
    bundle = build_data(config.data, config.train.seed)
    options = config.data.data_set_options()
    train, validation = (Batches(split, count, batch_size, options) for split in (bundle.train, bundle.validation))
    first = bundle.validation.gather(torch.tensor([0]))
    ids, mask = first["inputs"], first.get("mask")
    if ids.is_floating_point() or ids.dim() != 2:
        return Samples(train=train, validation=validation)
    ids = (ids if mask is None else ids[mask][None])[:, :TEXT_TOKENS]
    return Samples(train=train, validation=validation, text=(ids, strings_of(ids[0].tolist(), tokenizer)))


def open_run(
    folder: Path, *, count: int = SAMPLES, ema: bool = False, report: Callable[[str], None] | None = None
) -> Opened:
    """Read the newest model of a run, and samples of its data.

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
    config = plain_config(checkpoint.parents[1] / "config.yaml")
    tokenizer = find_tokenizer(checkpoint) if config.recipe == "language_modeling" else None
    length = config.data.shape().length
    fitting = count if length is None else max(1, min(count, TOKENS // length))
    return Opened(model, samples_of(config, tokenizer, count=fitting), checkpoint, tokenizer, fitting)


def pixels_of(images: Tensor, options: ImageOptions) -> Tensor:
    """Return normalised images as colours in [0, 1], ``[S, 3, height, width]``."""
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (options.mean, options.std))
    return (images * std + mean).clamp(0, 1).expand(-1, 3, -1, -1)


def strings_of(ids: list[int], tokenizer: DataTokenizer | None) -> list[str]:
    """Return how to write each token; the ids themselves where there is no text behind them."""
    if tokenizer is None:
        return [f"{number} " for number in ids]
    return [tokenizer.decode([number]) for number in ids]
