"""Models of runs, samples for analyses (from a run's data, or images and texts of the user), and generated text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from tost._io import read_text
from tost.analysis import Samples
from tost.data import Dataset, build_data
from tost.data.images.options import ImageFolderOptions, ImageOptions
from tost.data.images.transforms import EvaluationTransform, read_image
from tost.data.text.tokenizers import DataTokenizer
from tost.errors import ConfigError
from tost.generation import ByteTokenizer, Sampling, context_limit, stream_tokens
from tost.recipes import load_config
from tost.train.checkpoint.files import resolve_checkpoint
from tost.train.checkpoint.model import build_saved, read_saved
from tost.train.config import RunConfig
from tost.train.tokenizer import find_tokenizer

SAMPLES = 64
"""Samples of each split, unless they are long."""
_MOST_TOKENS = 16_384  # of each split
_TEXT_TOKENS = 512  # of the text whose memberships are shown
_USUAL_LENGTH = 256  # of a window for models of any length
_BEGINNING = 48  # tokens of the validation text that are continued if no prompt is given
_TEMPERATURE, _TOP_K, _SEED = 0.8, 40, 0
_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif")
# Training images without augmentation.
_PLAIN = ("crop=none", "flip=0.0", "auto_augment=null", "color_jitter=0.0", "erasing=0.0", "repeats=1")


@dataclass(frozen=True)
class LoadedRun:
    """A run's model and samples.

    Attributes:
        model: Its newest model, in evaluation mode.
        samples: Samples of its data.
        checkpoint: Where the weights are from.
        tokenizer: What its ids mean; None if the data is not text, or the tokenizer is unknown.
    """

    model: nn.Module
    samples: Samples
    checkpoint: Path
    tokenizer: DataTokenizer | None


class Batches:
    """Some samples of a data set, drawn at random, in batches; can be iterated again and again.

    Args:
        dataset: The samples.
        count: How many.
        batch_size: How many at once.
        options: Options of the data; batches of images have ``"pixels"`` too, to be drawn.
    """

    def __init__(self, dataset: Dataset, count: int, batch_size: int, options: object = None) -> None:
        self.indices = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:count]
        self.dataset, self.batch_size, self.options = dataset, batch_size, options

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for indices in torch.split(self.indices, self.batch_size):
            batch = self.dataset.gather(indices)
            if isinstance(self.options, ImageOptions):
                batch = {**batch, "pixels": _pixels(batch["inputs"], self.options)}
            yield batch


def _plain_config(file: Path) -> RunConfig:
    """Read the configuration of a run, with images as they are: not cropped, mirrored or recoloured for training.

    Raises:
        ConfigError: It cannot be used here.
    """
    config = load_config(str(file))
    if not isinstance(config.data.data_set_options(), ImageOptions):
        return config
    return load_config(str(file), [f"data.options.{change}" for change in _PLAIN])


def run_samples(config_file: Path, *, count: int = SAMPLES, batch_size: int = 16) -> Samples:
    """Return samples of both splits of a run's data, and a text of it if it has any.

    Args:
        config_file: The configuration in the run folder.
        count: Samples of each split, at most; fewer if they are long.
        batch_size: Samples at once.

    Raises:
        ConfigError: The configuration cannot be used here, or the data is not there any more.
    """
    config = _plain_config(config_file)
    bundle = build_data(config.data, config.train.seed)
    options = config.data.data_set_options()
    train, validation = (Batches(split, count, batch_size, options) for split in (bundle.train, bundle.validation))
    first = bundle.validation.gather(torch.tensor([0]))
    ids, mask = first["inputs"], first.get("mask")
    if ids.is_floating_point() or ids.dim() != 2:
        return Samples(train=train, validation=validation)
    ids = (ids if mask is None else ids[mask][None])[:, :_TEXT_TOKENS]
    text = (ids, _strings(ids[0].tolist(), find_tokenizer(config_file.parent)))
    return Samples(train=train, validation=validation, text=text)


def load_run(folder: Path, *, count: int = SAMPLES, log: Callable[[str], None] | None = None) -> LoadedRun:
    """Read the newest model of a run, and samples of its data.

    Args:
        folder: The run folder, or one of its checkpoints.
        count: Samples of each split, at most; fewer if they are long.
        log: Receives a line for each newer checkpoint that is damaged and skipped.

    Raises:
        CheckpointError: There is no usable checkpoint.
        ConfigError: The configuration cannot be used here any more, or the data is not there.
    """
    checkpoint = resolve_checkpoint(folder, log or (lambda line: None))
    model = build_saved(read_saved(checkpoint), str(folder))
    config_file = checkpoint.parents[1] / "config.yaml"
    config = load_config(str(config_file))
    length = config.data.shape().length
    fitting = count if length is None else max(1, min(count, _MOST_TOKENS // length))
    tokenizer = find_tokenizer(checkpoint) if config.recipe == "language_modeling" else None
    return LoadedRun(model, run_samples(config_file, count=fitting), checkpoint, tokenizer)


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
    known = getattr(model, "options", None)
    options: object
    if config_file is not None:
        options = _plain_config(config_file).data.data_set_options()
        if not isinstance(options, ImageOptions):
            raise ConfigError(f"--images takes photographs, but the data of this run is {type(options).__name__}.")
    elif getattr(known, "in_chans", None) is None:
        raise ConfigError(f"--images takes photographs, but a {type(model).__name__} does not read any.")
    else:
        side = getattr(known, "image_size", 224)
        size = list(side) if isinstance(side, tuple) else side
        options = ImageFolderOptions(image_size=size, channels=known.in_chans, num_classes=2, crop="none", flip=0.0)  # type: ignore[union-attr]
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is no image file and no folder {path}.")
        files += sorted(f for f in path.rglob("*") if f.suffix.lower() in _ENDINGS) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"there are no images in {', '.join(map(str, paths))}; known are {', '.join(_ENDINGS)}.")
    transform = EvaluationTransform(options)
    chosen = [files[round(i * (len(files) - 1) / max(count - 1, 1))] for i in range(min(count, len(files)))]
    loaded = [transform(read_image(file.read_bytes(), str(file), channels=options.channels)) for file in chosen]
    batches = torch.split(torch.stack(loaded), batch_size)
    return Samples(validation=[{"inputs": inputs, "pixels": _pixels(inputs, options)} for inputs in batches])


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
        raise ConfigError(f"--text takes a text, but a {type(model).__name__} does not read tokens.")
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
    length = min(len(ids), getattr(options, "max_length", None) or _USUAL_LENGTH)
    windows = ids.unfold(0, length, length)[:count]
    shown = ids[None, : min(length, _TEXT_TOKENS)]
    return Samples(validation=torch.split(windows, batch_size), text=(shown, _strings(shown[0].tolist(), tokenizer)))


@dataclass(frozen=True)
class Passage:
    """A prompt and its continuation by a model."""

    prompt: str
    text: str
    tokens: int
    seconds: float


def continue_prompts(run: LoadedRun, prompts: Sequence[str], *, length: int = 300) -> list[Passage]:
    """Continue texts with the model of a run, always with the same seed.

    Args:
        run: A language modelling run.
        prompts: Texts to continue; if there are none, the beginning of its validation text.
        length: Tokens to generate, at most; fewer if the model has fewer positions.

    Raises:
        ConfigError: The model does not generate, or a prompt cannot be written with its tokens.
    """
    tokenizer = run.tokenizer
    if tokenizer is None:
        return []
    given = list(prompts)
    if not given and run.samples.text is not None:
        given = [tokenizer.decode(run.samples.text[0][0, :_BEGINNING].tolist())]
    limit = context_limit(run.model)
    sampling = Sampling(temperature=_TEMPERATURE, top_k=min(_TOP_K, tokenizer.vocab_size))
    passages = []
    for prompt in given:
        ids = torch.tensor([tokenizer.encode(prompt)])
        count = length if limit is None else max(0, min(length, limit - ids.shape[1]))
        generator = torch.Generator().manual_seed(_SEED)
        began = perf_counter()
        stream = stream_tokens(run.model, ids, max_new_tokens=count, sampling=sampling, generator=generator)
        tokens = [int(token) for token in stream]
        passages.append(Passage(prompt, tokenizer.decode(tokens), len(tokens), perf_counter() - began))
    return passages
