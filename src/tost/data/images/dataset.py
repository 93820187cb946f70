"""Image data sets: from a configuration to two splits of normalized tensors, augmented by draw numbers.

Small images are decoded once into one tensor, and augmented a batch at a time. Others stay on disk and are decoded one
by one, by the loader's workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tost._lazy import load
from tost.data._random import mix, mix_array
from tost.data.dataset import Batch, DataBundle, Dataset, fingerprint, spread
from tost.data.images.options import CustomImageOptions, ImageOptions
from tost.data.images.sources import ImageSource, Split, hash_lines
from tost.data.images.transforms import (
    BadImageError,
    EvaluationTransform,
    drawing_from,
    resized_size,
    scale_and_shift,
    training_transform,
)
from tost.data.spec import DataInfo
from tost.errors import ConfigError

_log = logging.getLogger("tost.data")
_SHOWN = 20  # bad images that are named one by one
_IN_A_ROW = 16  # this many bad images side by side are no accident
_TOLERATED = 100  # one image in this many may be bad
_AT_ONCE = 64  # images that are read in one go
_SHIFT, _FLIP = 0, 1  # purposes of random numbers
_AUGMENTATION = 1  # keeps its random numbers apart from others of the same seed


class PixelImages(Dataset):
    """Images that are held in memory, a batch at a time: resized, shifted, mirrored and normalized as one tensor.

    Args:
        pixels: uint8 ``[N, 1 or 3, height, width]``.
        targets: Labels, int64 ``[N]``.
        options: Size, normalization, and augmentation, of which only shifts and mirroring are applied.
        seed: Decides what is drawn, together with the draw number; None for no augmentation.
    """

    def __init__(self, pixels: Tensor, targets: Tensor, options: ImageOptions, *, seed: int | None) -> None:
        self.pixels, self.targets, self.options, self.seed = pixels, targets, options, seed
        self.draws = seed is not None
        self.repeats = options.repeats if self.draws else 1
        self._scale, self._shift = scale_and_shift(options)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.targets)

    def gather(self, indices: Tensor) -> Batch:
        """Return images as a batch: inputs float32 ``[B, C, height, width]``, targets int64 ``[B]``."""
        rows = indices % len(self) if self.draws else indices
        height, width = self.options.size
        images = self.pixels[rows]
        stored = (images.shape[-2], images.shape[-1])
        wanted = resized_size(stored, self.options)
        if stored != wanted and len(images):
            images = F.interpolate(images, wanted, mode=self.options.interpolation, antialias=True)
        top, left = (wanted[0] - height) // 2, (wanted[1] - width) // 2
        images = images[..., top : top + height, left : left + width].reshape(-1, images.shape[1], height, width)
        if self.seed is not None:
            if self.options.crop == "pad" and (padding := self.options.padding):
                images = _shift(images, padding, _random(self.seed, _SHIFT, indices))
            mirrored = _random(self.seed, _FLIP, indices).double() / 2**48 < self.options.flip
            images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
        inputs = images.expand(-1, self.options.channels, -1, -1).float().mul_(self._scale).add_(self._shift)
        return {"inputs": inputs, "targets": self.targets[rows]}


def _shift(images: Tensor, padding: int, random: Tensor) -> Tensor:
    """Move each image by up to `padding` pixels in both directions; black moves in."""
    height, width = images.shape[-2:]
    places = 2 * padding + 1
    down, right = random % places, random // places % places
    padded = F.pad(images, [padding] * 4)
    every_place = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view, [B, C, places, places, height, width]
    return every_place[torch.arange(len(images)), :, down, right]


def _random(seed: int, purpose: int, draws: Tensor) -> Tensor:
    """Return 48 random bits per draw, int64 ``[B]``."""
    bits = mix_array(mix(seed, purpose), draws.numpy().astype(np.uint64)) >> np.uint64(16)
    return torch.from_numpy(bits.astype(np.int64))


class StoredImages(Dataset):
    """Images that stay where they are and are decoded one by one.

    An image that cannot be read is replaced, unless `options` say otherwise. In training the next image that can be
    read takes its place, with that one's label. In validation a blank image does, with the label of the bad one: the
    number of images that are scored does not change. Each bad image is logged by every process that meets it. Reading
    ends with an error if more than one image in a hundred is bad.

    Args:
        source: Encoded images.
        rows: Which of them, int64 ``[n]``.
        targets: Labels by row, int64 ``[len(source)]``.
        options: Size, and what to do about bad images.
        transform: From a decoded image to a tensor.
        seed: Decides what is drawn, together with the draw number; None for validation.
        extra: Further tensors by row, such as ``"real"``.
    """

    def __init__(
        self,
        source: ImageSource,
        rows: Tensor,
        targets: Tensor,
        options: ImageOptions,
        transform: Callable[[Image.Image], Tensor],
        *,
        seed: int | None,
        extra: dict[str, Tensor] | None = None,
    ) -> None:
        self.source, self.rows, self.targets = source, rows, targets
        self.options, self.transform, self.seed, self.extra = options, transform, seed, extra or {}
        self.draws = seed is not None
        self.repeats = options.repeats if self.draws else 1
        self._bad: dict[int, str] = {}

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def gather(self, indices: Tensor) -> Batch:
        """Return images as a batch: inputs float32 ``[B, C, height, width]``, targets int64 ``[B]``."""
        shape = (self.options.channels, *self.options.size)
        inputs = torch.empty(len(indices), *shape)
        rows = torch.empty(len(indices), dtype=torch.int64)
        for place, index in enumerate(indices.tolist()):
            inputs[place], rows[place] = self._sample(index)
        taken = {"targets": self.targets, **self.extra}
        return {"inputs": inputs, **{key: values[rows] for key, values in taken.items()}}

    def _sample(self, draw: int) -> tuple[Tensor, int]:
        """Return an image and its row, or the next image that can be read."""
        first = draw % len(self)
        for step in range(min(_IN_A_ROW, len(self))):
            row = int(self.rows[(first + step) % len(self)])
            try:
                image = self.source.image(row)
                if self.seed is None:
                    return self.transform(image), row
                with drawing_from(mix(self.seed, draw)):
                    return self.transform(image), row
            except BadImageError as error:
                self._note(row, error)
                if self.seed is None:
                    return torch.zeros(self.options.channels, *self.options.size), row
        raise BadImageError(f"no image can be read any more; the last that failed:{self._list()}")

    def _note(self, row: int, error: BadImageError) -> None:
        """Record a bad image: log it the first time, and raise an error if there are too many."""
        text = str(error)
        if self.options.on_bad_image == "error":
            raise BadImageError(
                f"{text}; repair or remove it, or set data.options.on_bad_image to replace to continue without it."
            ) from error
        if row in self._bad:
            return
        self._bad[row] = text
        if len(self._bad) <= _SHOWN:
            instead = "a blank image is scored" if self.seed is None else "its neighbour is taken"
            last = "; further ones are not named" if len(self._bad) == _SHOWN else ""
            _log.warning("%s; %s instead%s", text, instead, last)
        if len(self._bad) > max(1, len(self) // _TOLERATED):
            raise BadImageError(
                f"{len(self._bad)} of {len(self)} images cannot be read, more than one in {_TOLERATED}; "
                f"repair or remove them:{self._list()}"
            ) from error

    def _list(self) -> str:
        return "".join(f"\n  {text}" for text in list(self._bad.values())[-_SHOWN:])


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
    in_memory = isinstance(options, CustomImageOptions) and options.in_memory
    is_plain = seed is None or in_memory
    transform = EvaluationTransform(options, normalize=not in_memory) if is_plain else training_transform(options)
    stored = StoredImages(split.source, rows, split.targets, options, transform, seed=seed, extra=dict(split.extra))
    if not in_memory:
        return stored
    # Read and resized once; bad images are replaced for good.
    parts = [stored.gather(numbers) for numbers in torch.split(torch.arange(len(rows)), _AT_ONCE)]
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
            f"the splits of {path} have different classes: only {options.train_split!r} has "
            f"{_few(sorted(first - second))}; only {options.validation_split!r} has {_few(sorted(second - first))}."
        )
    expected = options.class_count(str(path))
    if train.class_names and len(train.class_names) != expected:
        known = options.known_classes is not None
        remedy = "this is another data set" if known else "correct data.options.num_classes, or set it to null"
        raise ConfigError(
            f"{path} has {len(train.class_names)} classes ({_few(train.class_names)}), but {expected} are expected; "
            f"{remedy}."
        )
    for split, name in ((train, options.train_split), (validation, options.validation_split)):
        low, high = (int(edge()) for edge in (split.targets.min, split.targets.max)) if len(split.targets) else (-1, -1)
        if not 0 <= low <= high < expected:
            held = f"labels from {low} to {high}" if len(split.targets) else "no images"
            raise ConfigError(
                f"the split {name!r} of {path} has {held}, but {expected} classes are numbered 0 to {expected - 1}."
            )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return f"{shown}, ..." if len(names) > 5 else shown
