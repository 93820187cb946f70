"""From the bytes of an image file to pixels.

Every kind of image becomes RGB, or grey on request, with 8 bits per channel. Transparent parts become
white. 16-bit grey keeps its upper byte. An orientation in EXIF data is not applied, as is the convention of ImageNet.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tost.errors import StorageError

FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded, all of it in this process: Pillow opens EPS files with Ghostscript, whatever their name."""
_WHITE = (255, 255, 255, 255)
_LONGEST_SIDE = 1 << 20  # pixels
_STRIP = 1 << 22  # pixels that are converted at a time


class BadImageError(StorageError):
    """An image cannot be read; the message names it."""


def read_image(data: bytes, name: str, *, channels: int = 3) -> Image.Image:
    """Decode an image.

    Args:
        data: Content of an image file in one of `FORMATS`.
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
            width, height = image.size
            if max(width, height) > _LONGEST_SIDE:  # a row takes memory besides its pixels
                raise ValueError(
                    f"{image.width} x {image.height} pixels; no image has a side of over {_LONGEST_SIDE:,}"
                )
            image.load()
            plain = _to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # decoders of broken files raise about anything
        reason = str(error) or type(error).__name__
        if reason.startswith("cannot identify image file"):  # then Pillow shows the object that held the bytes
            reason = "unknown format"
        raise BadImageError(f"{name} cannot be read as an image: {reason}") from error
    return plain.convert("L") if channels == 1 else plain


def _to_rgb(image: Image.Image) -> Image.Image:
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
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        layered = image if image.mode == "RGBA" else image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, _WHITE), layered).convert("RGB")
    return image.convert("RGB")


def to_grey(pixels: Tensor) -> Tensor:
    """Return colour images in grey, with the weights and the rounding of Pillow.

    Args:
        pixels: uint8 ``[N, 3, height, width]``.

    Returns:
        uint8 ``[N, 1, height, width]``.
    """
    red, green, blue = pixels.to(torch.int32).unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8).unsqueeze(1)
