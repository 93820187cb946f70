"""What `tost analyze` shows to a model: samples of its run, images or a text of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tost.analysis import Samples
    from tost.data import Dataset
    from tost.data.image_options import ImageOptions
    from tost.train.config import RunConfig

__all__ = ["gather_samples"]

TEXT_TOKENS = 512
USUAL_LENGTH = 256
_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif")
# The training images as they are: what augmentation does to them is no property of the model.
_PLAIN = ("crop=none", "flip=0.0", "auto_augment=null", "color_jitter=0.0", "erasing=0.0", "repeats=1")


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


class _Batches:
    """Batches of a data set that can be gone through again and again; one is held at a time."""

    def __init__(self, dataset: Dataset, count: int, batch_size: int, options: object) -> None:
        import torch

        count = min(count, len(dataset))
        # Spread over the set: files are often sorted by class.
        self.indices = torch.linspace(0, len(dataset) - 1, count).round().long()
        self.dataset, self.batch_size, self.options = dataset, batch_size, options

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        from tost.data.image_options import ImageOptions

        for chosen in _pieces(self.indices, self.batch_size):
            batch = self.dataset.gather(chosen)
            if isinstance(self.options, ImageOptions):
                batch = {**batch, "pixels": _pixels(batch["inputs"], self.options)}
            yield batch


def _pieces(rows: Tensor, size: int) -> list[Tensor]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _load_config(file: Path) -> RunConfig:
    from tost.data.image_options import ImageOptions
    from tost.train.config import load_config

    config = load_config(str(file))
    if not isinstance(config.data.data_set_options(), ImageOptions):
        return config
    return load_config(str(file), [f"data.options.{change}" for change in _PLAIN])


def _from_run(file: Path, count: int, batch_size: int) -> Samples:
    import torch

    from tost.analysis import Samples
    from tost.data import build_data
    from tost.data.image_options import ImageOptions

    config = _load_config(file)
    bundle = build_data(config.data, config.train.seed)
    options = config.data.data_set_options()
    train, validation = (_Batches(split, count, batch_size, options) for split in (bundle.train, bundle.validation))
    if isinstance(options, ImageOptions):
        return Samples(train=train, validation=validation)
    first = bundle.validation.gather(torch.tensor([0]))
    ids, mask = first["inputs"], first.get("mask")
    if ids.is_floating_point() or ids.dim() != 2:
        return Samples(train=train, validation=validation)
    if mask is not None:
        ids = ids[mask][None]
    ids = ids[:, :TEXT_TOKENS]
    return Samples(train=train, validation=validation, text=(ids, _strings(ids[0].tolist(), _tokenizer(config))))


def _pixels(images: Tensor, options: ImageOptions) -> Tensor:
    """Return normalised images as colours in [0, 1]."""
    import torch

    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (options.mean, options.std))
    return (images * std + mean).clamp(0, 1).expand(-1, 3, -1, -1)


def _tokenizer(config: RunConfig) -> Any:
    """Return what turns ids into text; None where nobody knows."""
    from tost.data import tokenizer_of

    try:
        return tokenizer_of(config.data)
    except ConfigError:
        return None


def _strings(ids: list[int], tokenizer: Any) -> list[str]:
    """Return how to write each token; ids themselves where there is no text behind them."""
    if tokenizer is None:
        return [f"{number} " for number in ids]
    return [tokenizer.decode([number]) for number in ids]


def _image_options(model: nn.Module, config_file: Path | None) -> ImageOptions:
    """Return size and normalisation of the run's images, or those of ImageNet in the size of the model."""
    from tost.data.image_options import ImageFolderOptions, ImageOptions

    if config_file is not None:
        options = _load_config(config_file).data.data_set_options()
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
    from tost.data.images_read import read_image
    from tost.data.images_transform import evaluation_transform

    transform = evaluation_transform(options)
    files = _files(paths)
    chosen = [files[round(i * (len(files) - 1) / max(count - 1, 1))] for i in range(min(count, len(files)))]
    loaded = [transform(read_image(file.read_bytes(), str(file), channels=options.channels)) for file in chosen]
    inputs = torch.stack(loaded)
    return Samples(validation=_pieces(inputs, batch_size), pixels=_pixels(inputs, options))


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

    options = getattr(model, "options", None)
    size = getattr(options, "vocab_size", None)
    if size is None:
        raise ConfigError(f"--text shows a text to the model, but a {type(model).__name__} does not read tokens.")
    tokenizer = None if config_file is None else _tokenizer(_load_config(config_file))
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
    return Samples(validation=_pieces(windows, batch_size), text=(shown, _strings(shown[0].tolist(), tokenizer)))


def _bytes(size: int) -> Any:
    from tost.generate import ByteTokenizer

    known = ByteTokenizer()
    if size != known.vocab_size:
        raise ConfigError(
            f"the model has {size} ids, and without its run nobody knows which text they stand for; name the run "
            "folder, or call tost.analysis.text_memberships from Python."
        )
    return known
