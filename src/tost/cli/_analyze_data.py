"""What `tost analyze` shows to a model: samples of its run, images or a text of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tost.analysis import Samples
    from tost.data.images.options import ImageOptions

__all__ = ["gather_samples"]

USUAL_LENGTH = 256
_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif")


def gather_samples(
    model: nn.Module,
    config_file: Path | None,
    *,
    images: Sequence[Path] = (),
    text: Path | None = None,
    count: int,
    batch_size: int,
) -> Samples:
    """Return what a model is to be looked at with.

    Args:
        model: The model.
        config_file: Configuration of the run that it comes from; None if it lies by itself.
        images: Files and folders of images to take instead of the run's.
        text: A file to take instead of the run's text.
        count: How many samples of each split.
        batch_size: How many at once.

    Raises:
        ConfigError: Images or text do not fit the model, or there are none.
    """
    from tost.analysis import Samples

    if images and text is not None:
        raise ConfigError("--images and --text are both given; a model takes one of the two.")
    if images:
        return _from_images(model, _image_options(model, config_file), images, count, batch_size)
    if text is not None:
        return _from_text(model, config_file, text, count, batch_size)
    return Samples() if config_file is None else _from_run(config_file, count, batch_size)


def _pieces(rows: Tensor, size: int) -> list[Tensor]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _from_run(file: Path, count: int, batch_size: int) -> Samples:
    from tost.report.samples import plain_config, samples_of
    from tost.train.tokenizer import find_tokenizer

    return samples_of(plain_config(file), find_tokenizer(file.parent), count=count, batch_size=batch_size)


def _image_options(model: nn.Module, config_file: Path | None) -> ImageOptions:
    """Return size and normalisation of the run's images, or those of ImageNet in the size of the model."""
    from tost.data.images.options import ImageFolderOptions, ImageOptions
    from tost.report.samples import plain_config

    if config_file is not None:
        options = plain_config(config_file).data.data_set_options()
        if isinstance(options, ImageOptions):
            return options
        raise ConfigError(f"--images shows photographs to the model, but its run is about {type(options).__name__}.")
    known = getattr(model, "options", None)
    if getattr(known, "in_chans", None) is None:
        raise ConfigError(f"--images shows photographs to the model, but a {type(model).__name__} does not read any.")
    side = getattr(known, "image_size", 224)
    size = list(side) if isinstance(side, tuple) else side
    return ImageFolderOptions(image_size=size, channels=known.in_chans, num_classes=2, crop="none", flip=0.0)  # type: ignore[union-attr]


def _from_images(
    model: nn.Module, options: ImageOptions, paths: Sequence[Path], count: int, batch_size: int
) -> Samples:
    import torch

    from tost.analysis import Samples
    from tost.data.images.decode import read_image
    from tost.data.images.transform import evaluation_transform
    from tost.report.samples import pixels_of

    transform = evaluation_transform(options)
    files = _files(paths)
    chosen = [files[round(i * (len(files) - 1) / max(count - 1, 1))] for i in range(min(count, len(files)))]
    loaded = [transform(read_image(file.read_bytes(), str(file), channels=options.channels)) for file in chosen]
    batches = _pieces(torch.stack(loaded), batch_size)
    return Samples(validation=[{"inputs": inputs, "pixels": pixels_of(inputs, options)} for inputs in batches])


def _files(paths: Sequence[Path]) -> list[Path]:
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


def _from_text(model: nn.Module, config_file: Path | None, file: Path, count: int, batch_size: int) -> Samples:
    import torch

    from tost.analysis import Samples
    from tost.report.samples import TEXT_TOKENS, strings_of
    from tost.train.tokenizer import find_tokenizer

    options = getattr(model, "options", None)
    size = getattr(options, "vocab_size", None)
    if size is None:
        raise ConfigError(f"--text shows a text to the model, but a {type(model).__name__} does not read tokens.")
    tokenizer = None if config_file is None else find_tokenizer(config_file.parent)
    if tokenizer is None:
        tokenizer = _bytes(size)
    try:
        content = file.read_bytes().decode("utf-8", errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"cannot read the text {file}: {error.strerror}") from error
    ids = torch.tensor(tokenizer.encode(content), dtype=torch.int64)
    if len(ids) < 2:
        raise ConfigError(f"{file} has {len(ids)} tokens; a text to look at needs at least 2.")
    length = min(len(ids), getattr(options, "max_length", None) or USUAL_LENGTH)
    starts = torch.arange(0, len(ids) - length + 1, length)[:count]
    windows = torch.stack([ids[start : start + length] for start in starts.tolist()])
    shown = ids[None, : min(length, TEXT_TOKENS)]
    return Samples(validation=_pieces(windows, batch_size), text=(shown, strings_of(shown[0].tolist(), tokenizer)))


def _bytes(size: int) -> Any:
    from tost.generation import ByteTokenizer

    known = ByteTokenizer()
    if size != known.vocab_size:
        raise ConfigError(
            f"the model has {size} ids, and without its run nobody knows which text they stand for; name the run "
            "folder, or call tost.analysis.text_memberships from Python."
        )
    return known
