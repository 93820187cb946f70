"""Interface of the image sources, and helpers that they share. One row is one image.

A source holds names and places, not images, so that it is small enough to be sent to worker processes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tost.data.images.decode import BadImageError, read_image
from tost.errors import ConfigError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
_SHOWN = 8
_LARGEST = 1 << 30  # bytes of an image file
_AT_ONCE = 256  # images that a thread decodes before it asks for more


class ImageSource:
    """Images by number."""

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, row: int) -> str:
        """Return what to call an image in messages, such as its path."""
        raise NotImplementedError

    def file_name(self, row: int) -> str:
        """Return the name under which an image was published, if it is known."""
        return self.name(row)

    def read(self, row: int) -> bytes:
        """Return the content of an image's file.

        Raises:
            OSError: It cannot be read.
        """
        raise NotImplementedError

    def image(self, row: int, *, channels: int = 3) -> Image.Image:
        """Return an image, decoded, of mode ``RGB``, or ``L`` if it has one channel.

        Raises:
            BadImageError: It cannot be read.
        """
        try:
            data = self.read(row)
        except OSError as error:
            raise BadImageError(f"{self.name(row)} cannot be opened: {error.strerror or error}") from error
        return read_image(data, self.name(row), channels=channels)

    def decode(self, rows: Tensor, size: tuple[int, int], *, channels: int) -> Tensor:
        """Return images of one size as one tensor, uint8 ``[n, channels, height, width]``.

        Args:
            rows: Which, int64 ``[n]``.
            size: Height and width that each must have.
            channels: 1 or 3.

        Raises:
            BadImageError: An image cannot be read.
            ConfigError: An image has another size.
        """
        pixels = np.empty((len(rows), *size, channels), dtype=np.uint8)

        def decode(start: int) -> None:
            for place, row in enumerate(rows[start : start + _AT_ONCE].tolist(), start):
                image = self.image(row, channels=channels)
                if (image.height, image.width) != size:
                    raise ConfigError(
                        f"{self.name(row)} has {image.height} x {image.width} pixels, but this data set has images of "
                        f"{size[0]} x {size[1]}."
                    )
                pixels[place] = np.asarray(image).reshape(*size, channels)

        with ThreadPoolExecutor() as threads:  # decoders let other threads run
            for _ in threads.map(decode, range(0, len(rows), _AT_ONCE)):
                pass
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def fingerprint(self) -> str:
        """Return a SHA-256 that identifies the images; where they are many, their listing stands for them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split of a data set, before anything is chosen from it.

    Attributes:
        source: The images.
        targets: Their labels, int64 ``[N]``.
        class_names: In the order of the labels; empty if they are not known.
        layout: Kind of files it was read from, such as ``"folder"``.
        image_size: Height and width, if all images have the same by definition.
        extra: Further tensors by row.
    """

    source: ImageSource
    targets: Tensor
    layout: str
    class_names: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


def check_folder(path: Path, expected: str) -> None:
    """Refuse a path that is no folder.

    Args:
        path: Value of ``data.path``.
        expected: What it should point at, for the message.

    Raises:
        ConfigError: It does not exist or is a file.
    """
    if not path.exists():
        raise ConfigError(f"data.path {path} does not exist; it must point at {expected}.")
    if not path.is_dir():
        raise ConfigError(f"data.path {path} is a file; it must point at {expected}.")


def find_folder(path: Path, places: Iterable[Path], needed: Sequence[str], expected: str) -> Path:
    """Return the first of some places that holds all that is needed.

    Args:
        path: Value of ``data.path``.
        places: Where to look.
        needed: Names of files and folders.
        expected: What the path should point at, for the message.

    Raises:
        ConfigError: None of them does; the message says what is missing and what is there.
    """
    check_folder(path, expected)
    present = [place for place in places if place.is_dir()]
    for place in present:
        if all((place / name).exists() for name in needed):
            return place
    missing = [name for name in needed if not (present[0] / name).exists()]
    raise ConfigError(
        f"{present[0]} has no {' and no '.join(missing)}, it has: {entries(present[0])}; data.path must point at "
        f"{expected}."
    )


def entries(path: Path) -> str:
    """Return the first entries of a folder, for messages."""
    found = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (", ".join(found[:_SHOWN]) + more) if found else "nothing"


def check_size(size: int) -> None:
    """Refuse to read an image file that no image fills.

    Raises:
        OSError: It has more than a gigabyte.
    """
    if size > _LARGEST:
        raise OSError(f"it has {size:,} bytes; images of more than {_LARGEST:,} are not read")


def is_image(name: str) -> bool:
    """Return whether a file is an image by its name; hidden files are none."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def pack_names(names: Sequence[str]) -> NDArray[np.bytes_]:
    """Return names as one array: a million strings would be copied into every worker as soon as they are counted."""
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def hash_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text, in hexadecimal."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", errors="surrogateescape"))
        digest.update(b"\n")
    return digest.hexdigest()
