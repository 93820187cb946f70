"""Image data sets: from a configuration to the two splits.

Small images are decoded once into one tensor, and augmented a batch at a time. Others stay on disk and are decoded one
by one, by the loader's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tost._lazy import load
from tost.data._random import mix
from tost.data.dataset import DataBundle, Dataset, fingerprint, spread
from tost.data.images.dataset import PixelImages, StoredImages
from tost.data.images.options import CustomImageOptions, ImageOptions
from tost.data.images.sources.base import Split, hash_lines
from tost.data.images.transform import evaluation_transform
from tost.data.spec import DataInfo
from tost.errors import ConfigError

_AT_ONCE = 64  # images that are read in one go
_AUGMENTATION = 1  # keeps its random numbers apart from others of the same seed


def build_images(options: ImageOptions, path: str, seed: int) -> DataBundle:
    """Return an image data set: inputs float32 ``[C, height, width]``, normalized; targets int64 ``[]``.

    Args:
        options: What to read, and how.
        path: Its folder or file.
        seed: Decides the augmentation, together with the draw number.

    Raises:
        ConfigError: The files are not what the data set consists of, or do not fit the options.
    """
    open_split: Callable[[ImageOptions, Path, str], Split] = load(options.opener)
    root = Path(path)
    train = open_split(options, root, options.train_split)
    if options.hold_out:
        validation = train
        rows, held_out = _hold_out(train.targets, options.hold_out, root)
    else:
        validation = open_split(options, root, options.validation_split)
        rows, held_out = (torch.arange(len(split.targets)) for split in (train, validation))
    _check_classes(train, validation, options, root)
    rows, held_out = spread(rows, options.limit), spread(held_out, options.limit)
    content = train.source.fingerprint()
    parts = [content, fingerprint(train.targets, rows, *train.extra.values())]
    parts.append(content if validation is train else validation.source.fingerprint())
    parts.append(fingerprint(validation.targets, held_out, *validation.extra.values()))
    counts = {"train_images": len(rows), "validation_images": len(held_out)}
    return DataBundle(
        train=_dataset(train, rows, options, seed=mix(seed, _AUGMENTATION)),
        validation=_dataset(validation, held_out, options, seed=None),
        info=DataInfo(
            fingerprint=hash_lines(parts), details={"layout": train.layout, **counts}, class_names=train.class_names
        ),
    )


def _dataset(split: Split, rows: Tensor, options: ImageOptions, *, seed: int | None) -> Dataset:
    if split.image_size and (seed is None or options.is_vectorized):
        pixels = split.source.decode(rows, split.image_size, channels=options.channels)
        return PixelImages(pixels, split.targets[rows], options, seed=seed)
    if isinstance(options, CustomImageOptions) and options.in_memory:
        return _read_all(split, rows, options, seed=seed)
    if seed is None:
        transform = evaluation_transform(options)
    else:
        from tost.data.images.augment import training_transform  # takes seconds to load

        transform = training_transform(options)
    return StoredImages(split.source, rows, split.targets, options, transform, seed=seed, extra=dict(split.extra))


def _read_all(split: Split, rows: Tensor, options: ImageOptions, *, seed: int | None) -> PixelImages:
    """Return images of any size in memory, resized once; bad ones are replaced for good."""
    transform = evaluation_transform(options, normalize=False)
    reader = StoredImages(split.source, rows, split.targets, options, transform, seed=seed)
    everything = torch.arange(len(rows))
    parts = [reader.gather(everything[start : start + _AT_ONCE]) for start in range(0, len(rows), _AT_ONCE)]
    pixels = torch.cat([part["inputs"].to(torch.uint8) for part in parts])
    targets = torch.cat([part["targets"] for part in parts])
    return PixelImages(pixels, targets, options.model_copy(update={"eval_resize": "squash"}), seed=seed)


def _hold_out(targets: Tensor, count: int, path: Path) -> tuple[Tensor, Tensor]:
    """Split rows in two, the second of `count` rows and with every class in proportion; the same rows every time."""
    if count >= len(targets):
        raise ConfigError(
            f"data.options.hold_out={count} leaves nothing to train on; the split in {path} has {len(targets)} images."
        )
    by_class = torch.argsort(targets, stable=True)
    held = torch.zeros(len(targets), dtype=torch.bool)
    held[spread(by_class, count)] = True
    rows = torch.arange(len(targets))
    return rows[~held], rows[held]


def _check_classes(train: Split, validation: Split, options: ImageOptions, path: Path) -> None:
    if train.class_names != validation.class_names:
        first, second = set(train.class_names), set(validation.class_names)
        raise ConfigError(
            f"the splits of {path} have different classes: {len(train.class_names)} in {options.train_split!r} "
            f"(alone there: {_few(sorted(first - second))}), {len(validation.class_names)} in "
            f"{options.validation_split!r} (alone there: {_few(sorted(second - first))})."
        )
    expected = options.class_count(str(path))
    if train.class_names and len(train.class_names) != expected:
        remedy = "this is another data set"
        if options.known_classes is None:
            remedy = "correct data.options.num_classes, or set it to null to have folders counted"
        raise ConfigError(
            f"{path} has {len(train.class_names)} classes ({_few(train.class_names)}), but {expected} are expected; "
            f"{remedy}."
        )
    for split, name in ((train, options.train_split), (validation, options.validation_split)):
        if not len(split.targets):
            raise ConfigError(f"the split {name!r} of {path} has no images.")
        low, high = int(split.targets.min()), int(split.targets.max())
        if low < 0 or high >= expected:
            raise ConfigError(
                f"the split {name!r} of {path} has labels from {low} to {high}, but {expected} classes are numbered "
                f"0 to {expected - 1}."
            )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return f"{shown}, ..." if len(names) > 5 else shown
