"""From the bytes of an image file to a normalized tensor.

Every kind of image becomes RGB, or grey on request, with 8 bits per channel. Transparent parts become white. 16-bit
grey keeps its upper byte. An orientation in EXIF data is not applied, as is the convention of ImageNet.

Transforms of timm and torchvision draw from the global generators of Python, numpy and torch. `drawing_from` seeds
these for a while and restores them afterwards.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tost.data.images.options import ImageOptions
from tost.errors import ConfigError, StorageError

FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read. Pillow knows more, and starts other programs for some of them (EPS)."""
_LONGEST_SIDE = 1 << 20  # pixels; a row takes memory besides its pixels
_STRIP = 1 << 22  # pixels that are converted at a time
_OF_TORCHVISION = re.compile(r"torchvision-(?:rand-n(?P<count>\d+)-m(?P<magnitude>\d+)|trivial)")


class BadImageError(StorageError):
    """An image cannot be read; the message names it."""


def read_image(data: bytes, name: str, *, channels: int = 3) -> Image.Image:
    """Decode an image.

    Args:
        data: Content of an image file, in one of `FORMATS`.
        name: What to call the image in messages.
        channels: 3 for RGB, 1 for grey.

    Returns:
        An image of mode ``RGB`` or ``L``.

    Raises:
        BadImageError: It is not an image, or truncated, or too large.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            limit = Image.MAX_IMAGE_PIXELS  # Pillow itself refuses only above twice its limit, and warns before
            if limit is not None and image.width * image.height > limit:
                raise ValueError(
                    f"{image.width} x {image.height} pixels are more than the limit of {limit}, which guards against "
                    "files that unpack to more than memory holds"
                )
            if max(image.size) > _LONGEST_SIDE:
                raise ValueError(
                    f"{image.width} x {image.height} pixels; no image has a side of over {_LONGEST_SIDE:,}"
                )
            image.load()
            plain = to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # decoders of broken files raise about anything
        reason = str(error) or type(error).__name__
        if reason.startswith("cannot identify image file"):  # then Pillow shows the object that held the bytes
            reason = f"unknown format; the formats that are read are {', '.join(FORMATS)}"
        raise BadImageError(f"{name} cannot be read as an image: {reason}") from error
    return plain.convert("L") if channels == 1 else plain


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB, converted in strips: at once, it would take memory for several copies of a large one."""
    rows = max(1, _STRIP // max(1, image.width))
    if rows >= image.height:
        return _strip_to_rgb(image)
    plain = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(image.height, top + rows))
        plain.paste(_strip_to_rgb(image.crop(box)), box)
    return plain


def _strip_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64).clip(0, 0xFFFF)
        return Image.fromarray((deep >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is not known; store it with 8 or 16 bits")
    if {"A", "a"} & set(image.getbands()) or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def to_grey(pixels: Tensor) -> Tensor:
    """Return colour images, uint8 ``[N, 3, height, width]``, in grey with the weights and the rounding of Pillow."""
    red, green, blue = pixels.to(torch.int32).unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8).unsqueeze(1)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Let the global generators of Python, numpy and torch (CPU) start from a seed; afterwards they are restored.

    Args:
        seed: 64 bits.
    """
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def resized_size(stored: tuple[int, int], options: ImageOptions) -> tuple[int, int]:
    """Return the size to which an image is resized for validation, before its centre is cut out.

    Args:
        stored: Height and width of the image.
        options: `image_size` and `eval_resize`.
    """
    height, width = options.size
    if options.eval_resize == "squash":
        return height, width
    if isinstance(options.eval_resize, int):
        height = width = options.eval_resize
    else:
        height, width = height * 8 // 7, width * 8 // 7  # 256 for 224
    # The smallest size of the image's own shape that covers the box; its longer side is rounded down, as usual.
    if stored[0] * width >= stored[1] * height:
        return max(height, stored[0] * width // stored[1]), width
    return height, max(width, stored[1] * height // stored[0])


def scale_and_shift(options: ImageOptions) -> tuple[Tensor, Tensor]:
    """Return scale and shift that normalize pixels from 0 to 255, each float32 ``[1 or C, 1, 1]``."""
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (options.mean, options.std))
    return 1 / (255 * std), -mean / std


class EvaluationTransform:
    """Resizes an image, cuts out the centre and normalizes it.

    Args:
        options: Sizes, interpolation and normalization.
        normalize: False keeps values from 0 to 255.
    """

    def __init__(self, options: ImageOptions, *, normalize: bool = True) -> None:
        self.options = options
        self.normalization = scale_and_shift(options) if normalize else None

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the tensor of an image of mode ``RGB``."""
        return self.to_tensor(self.fit(image))

    def fit(self, image: Image.Image) -> Image.Image:
        """Return the image in the size of the options."""
        height, width = self.options.size
        rows, columns = resized_size((image.height, image.width), self.options)
        if (image.height, image.width) != (rows, columns):
            image = image.resize((columns, rows), Image.Resampling[self.options.interpolation.upper()])
        top, left = (rows - height) // 2, (columns - width) // 2
        return image if (rows, columns) == (height, width) else image.crop((left, top, left + width, top + height))

    def to_tensor(self, image: Image.Image) -> Tensor:
        """Return float32 ``[C, height, width]``; colour goes last, because policies want three channels."""
        pixels = torch.from_numpy(np.array(image.convert("L") if self.options.channels == 1 else image))
        values = pixels.view(image.height, image.width, -1).permute(2, 0, 1).float()
        if self.normalization is None:
            return values
        scale, shift = self.normalization
        return values.mul_(scale).add_(shift)


def training_transform(options: ImageOptions) -> Callable[[Image.Image], Tensor]:
    """Return the transform of training images; it draws at random, so call it inside `drawing_from`.

    Args:
        options: Crop, mirroring, policy, erasing, size and normalization.

    Returns:
        From a decoded image of mode ``RGB`` to float32 ``[C, height, width]``.

    Raises:
        ConfigError: The policy does not exist.
    """
    import tost._torchvision  # noqa: F401  prepares a CPU build of torch for torchvision, and so for timm

    # isort: split
    from timm.data.auto_augment import posterize
    from timm.data.random_erasing import RandomErasing
    from timm.data.transforms_factory import create_transform
    from torchvision import transforms  # type: ignore[import-untyped]

    make: Any = create_transform
    erase: Any = RandomErasing
    name = options.auto_augment
    of_torchvision = _OF_TORCHVISION.fullmatch(name or "")
    try:
        crop_and_flip, policy, _ = make(
            (3, *options.size),
            is_training=True,
            scale=options.crop_scale,
            ratio=options.crop_ratio,
            hflip=options.flip,
            color_jitter=options.color_jitter or None,
            auto_augment=None if of_torchvision else name,
            interpolation=options.interpolation,
            mean=(options.mean * 3)[:3],
            separate=True,
        )
    except (AssertionError, ValueError, KeyError) as error:
        raise ConfigError(
            f"data.options.auto_augment={name!r} is not a policy of timm ({error or 'a part is unknown'}); "
            "write for example rand-m9-mstd0.5-inc1."
        ) from error
    if of_torchvision and of_torchvision["count"]:
        policy = transforms.RandAugment(int(of_torchvision["count"]), int(of_torchvision["magnitude"]))
    elif of_torchvision:
        policy = transforms.TrivialAugmentWide()
    else:
        for operation in (operation for step in policy.transforms for operation in getattr(step, "ops", [])):
            if operation.aug_fn is posterize:
                operation.aug_fn = partial(_posterize, posterize)
    as_validation = EvaluationTransform(options)
    steps: list[Callable[..., Any]] = [crop_and_flip]
    if options.crop != "resized":
        steps = [as_validation.fit]
        if options.crop == "pad":
            steps.append(transforms.RandomCrop(options.size, padding=options.padding))
        steps.append(transforms.RandomHorizontalFlip(options.flip))
    steps += [policy, as_validation.to_tensor]
    if options.erasing:
        steps.append(erase(options.erasing, mode=options.erasing_mode, max_count=options.erasing_count, device="cpu"))
    composed: Callable[[Image.Image], Tensor] = transforms.Compose(steps)
    return composed


def _posterize(keep: Any, image: Image.Image, bits: int, **settings: Any) -> Image.Image:
    """Let timm's strongest Posterize, which keeps 0 bits of each pixel, work with Pillow 13, which refuses that."""
    return keep(image, bits, **settings) if bits > 0 else Image.new(image.mode, image.size)
