"""Samples for analyses: from a run's data, or from images and texts of the user. Loads torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import torch
from torch import Tensor, nn

from tost._io import read_text
from tost.analysis import Samples
from tost.data import Dataset, build_data
from tost.data.images.decode import read_image
from tost.data.images.options import ImageFolderOptions, ImageOptions
from tost.data.images.transform import evaluation_transform
from tost.data.text.tokenizers import DataTokenizer
from tost.errors import ConfigError
from tost.generation import ByteTokenizer
from tost.recipes import load_config
from tost.train.checkpoint.files import resolve_checkpoint
from tost.train.checkpoint.model import build_saved, read_saved
from tost.train.config import RunConfig
from tost.train.tokenizer import find_tokenizer

SAMPLES = 64
"""Samples of each split that are looked at, unless they are long."""
TOKENS = 16_384
"""Tokens of each split that are looked at, at most."""
TEXT_TOKENS = 512
"""Tokens of the text whose memberships are shown, at most."""
USUAL_LENGTH = 256
"""Tokens of a window for models that take any number."""
_BATCH = 16
_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif")
# The training images as they are: what augmentation does to them is no property of the model.
_PLAIN = ("crop=none", "flip=0.0", "auto_augment=null", "color_jitter=0.0", "erasing=0.0", "repeats=1")


@dataclass(frozen=True)
class LoadedRun:
    """A run's model and samples.

    Attributes:
        model: Its newest model, in evaluation mode.
        samples: What to look at.
        checkpoint: Where the weights are from.
        tokenizer: What its ids mean; None if the data is not text, or the tokenizer is unknown.
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
                batch = {**batch, "pixels": _pixels(batch["inputs"], self.options)}
            yield batch


def _leap(count: int) -> int:
    """Return a step that visits all of `count` places, and spreads the first few of them: the golden section."""
    return next(step for step in range(max(1, round(0.618 * count)), 2 * count + 1) if gcd(step, count) == 1)


def _plain_config(file: Path) -> RunConfig:
    """Read the configuration of a run, with images as they are: not cropped, mirrored or recoloured for training.

    Raises:
        ConfigError: It cannot be used here.
    """
    config = load_config(str(file))
    if not isinstance(config.data.data_set_options(), ImageOptions):
        return config
    return load_config(str(file), [f"data.options.{change}" for change in _PLAIN])


def run_samples(config_file: Path, *, count: int = SAMPLES, batch_size: int = _BATCH) -> Samples:
    """Return samples of both splits of a run's data, and a text of it if it has any.

    Args:
        config_file: The configuration in the run folder.
        count: Samples of each split.
        batch_size: Samples at once.

    Raises:
        ConfigError: The configuration cannot be used here, or the data is not there any more.
    """
    tokenizer = find_tokenizer(config_file.parent)
    return _samples(_plain_config(config_file), tokenizer, count=count, batch_size=batch_size)


def _samples(config: RunConfig, tokenizer: DataTokenizer | None, *, count: int, batch_size: int = _BATCH) -> Samples:
    bundle = build_data(config.data, config.train.seed)
    options = config.data.data_set_options()
    train, validation = (Batches(split, count, batch_size, options) for split in (bundle.train, bundle.validation))
    first = bundle.validation.gather(torch.tensor([0]))
    ids, mask = first["inputs"], first.get("mask")
    if ids.is_floating_point() or ids.dim() != 2:
        return Samples(train=train, validation=validation)
    ids = (ids if mask is None else ids[mask][None])[:, :TEXT_TOKENS]
    return Samples(train=train, validation=validation, text=(ids, _strings(ids[0].tolist(), tokenizer)))


def load_run(
    folder: Path, *, count: int = SAMPLES, ema: bool = False, log: Callable[[str], None] | None = None
) -> LoadedRun:
    """Read the newest model of a run, and samples of its data.

    Args:
        folder: The run folder, or one of its checkpoints.
        count: Samples of each split, at most; fewer if they are long.
        ema: Take the moving average of the weights.
        log: Receives a line for each newer checkpoint that is damaged and passed over.

    Raises:
        CheckpointError: There is no usable checkpoint.
        ConfigError: The configuration cannot be used here any more, or the data is not there.
    """
    checkpoint = resolve_checkpoint(folder, log or (lambda line: None))
    model = build_saved(read_saved(checkpoint, ema=ema), str(folder)).eval()
    config = _plain_config(checkpoint.parents[1] / "config.yaml")
    tokenizer = find_tokenizer(checkpoint) if config.recipe == "language_modeling" else None
    length = config.data.shape().length
    fitting = count if length is None else max(1, min(count, TOKENS // length))
    return LoadedRun(model, _samples(config, tokenizer, count=fitting), checkpoint, tokenizer, fitting)


def _pixels(images: Tensor, options: ImageOptions) -> Tensor:
    """Return normalized images as colours in [0, 1], ``[S, 3, height, width]``."""
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (options.mean, options.std))
    return (images * std + mean).clamp(0, 1).expand(-1, 3, -1, -1)


def _strings(ids: list[int], tokenizer: DataTokenizer | ByteTokenizer | None) -> list[str]:
    """Return how to write each token; the ids themselves where they stand for no text."""
    if tokenizer is None:
        return [f"{number} " for number in ids]
    return [tokenizer.decode([number]) for number in ids]


def image_samples(
    model: nn.Module, config_file: Path | None, paths: Sequence[Path], *, count: int, batch_size: int
) -> Samples:
    """Return images of the user as a model takes them, with their pixels to be drawn.

    Args:
        model: An image model.
        config_file: Configuration of the run that it comes from; None for the normalization of ImageNet.
        paths: Image files and folders.
        count: Images to take, spread over the files.
        batch_size: Images at once.

    Raises:
        ConfigError: The model takes no images, or there are none.
    """
    options, files = _image_options(model, config_file), _image_files(paths)
    transform = evaluation_transform(options)
    chosen = [files[round(i * (len(files) - 1) / max(count - 1, 1))] for i in range(min(count, len(files)))]
    loaded = [transform(read_image(file.read_bytes(), str(file), channels=options.channels)) for file in chosen]
    batches = torch.split(torch.stack(loaded), batch_size)
    return Samples(validation=[{"inputs": inputs, "pixels": _pixels(inputs, options)} for inputs in batches])


def _image_options(model: nn.Module, config_file: Path | None) -> ImageOptions:
    """Return size and normalization of the run's images, or those of ImageNet in the size of the model."""
    if config_file is not None:
        options = _plain_config(config_file).data.data_set_options()
        if isinstance(options, ImageOptions):
            return options
        raise ConfigError(f"--images shows photographs to the model, but its run is about {type(options).__name__}.")
    known = getattr(model, "options", None)
    if getattr(known, "in_chans", None) is None:
        raise ConfigError(f"--images shows photographs to the model, but a {type(model).__name__} does not read any.")
    side = getattr(known, "image_size", 224)
    size = list(side) if isinstance(side, tuple) else side
    return ImageFolderOptions(image_size=size, channels=known.in_chans, num_classes=2, crop="none", flip=0.0)  # type: ignore[union-attr]


def _image_files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if file.suffix.lower() in _ENDINGS)
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(f"there is no image file and no folder {path}.")
    if not found:
        raise ConfigError(f"there are no images in {', '.join(map(str, paths))}; known are {', '.join(_ENDINGS)}.")
    return found


def text_samples(model: nn.Module, config_file: Path | None, file: Path, *, count: int, batch_size: int) -> Samples:
    """Return a text of the user as windows of tokens, and its beginning token by token.

    Args:
        model: A language model.
        config_file: Configuration of the run that it comes from; None for a model of bytes.
        file: The text.
        count: Windows to take.
        batch_size: Windows at once.

    Raises:
        ConfigError: The model takes no tokens, its tokenizer is unknown, or the text cannot be read or is too short.
    """
    options = getattr(model, "options", None)
    size = getattr(options, "vocab_size", None)
    if size is None:
        raise ConfigError(f"--text shows a text to the model, but a {type(model).__name__} does not read tokens.")
    known = None if config_file is None else find_tokenizer(config_file.parent)
    if known is None and size != ByteTokenizer.vocab_size:
        raise ConfigError(
            f"the model has {size} ids, and without its run it is unknown which text they stand for; name the run "
            "folder, or call tost.analysis.text_memberships from Python."
        )
    tokenizer = known or ByteTokenizer()
    ids = torch.tensor(tokenizer.encode(read_text(file)), dtype=torch.int64)
    if len(ids) < 2:
        raise ConfigError(f"{file} has {len(ids)} tokens; a text to look at needs at least 2.")
    length = min(len(ids), getattr(options, "max_length", None) or USUAL_LENGTH)
    windows = ids.unfold(0, length, length)[:count]
    shown = ids[None, : min(length, TEXT_TOKENS)]
    return Samples(validation=torch.split(windows, batch_size), text=(shown, _strings(shown[0].tolist(), tokenizer)))
