"""From the bytes of an image file to pixels.

Every kind of image becomes RGB, or grey where that is asked for, with 8 bits per channel. Transparent parts become
white. 16-bit grey keeps its upper byte. An orientation in EXIF data is not applied, as is the convention of ImageNet.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from tost.errors import StorageError

__all__ = ["BadImageError", "read_image"]

_WHITE = (255, 255, 255, 255)


class BadImageError(StorageError):
    """An image cannot be read; the message names it."""


def read_image(data: bytes, name: str, *, channels: int = 3) -> Image.Image:
    """Decode an image.

    Args:
        data: Content of an image file, in any format that Pillow knows.
        name: What to call the image in messages.
        channels: 3 for RGB, 1 for grey.

    Returns:
        An image of mode ``RGB`` or ``L``.

    Raises:
        BadImageError: It is no image, or truncated, or its size is out of all proportion.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            _check_size(image)
            image.load()
            plain = _to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # decoders of broken files raise about anything
        reason = str(error) or type(error).__name__
        raise BadImageError(f"{name} cannot be read as an image: {_without_object(reason)}") from error
    return plain.convert("L") if channels == 1 else plain


def _check_size(image: Image.Image) -> None:
    # Pillow itself refuses only above twice its limit, and warns before.
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise ValueError(
            f"{image.width} x {image.height} pixels are more than the limit of {limit}, which guards against files "
            "that unpack to more than memory holds"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64).clip(0, 0xFFFF)
        return Image.fromarray((deep >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is not known; store it with 8 or 16 bits")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        layered = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, _WHITE), layered).convert("RGB")
    return image.convert("RGB")


def _without_object(reason: str) -> str:
    # Pillow shows the object in memory that held the bytes, which tells a reader nothing.
    return "unknown format" if reason.startswith("cannot identify image file") else reason
