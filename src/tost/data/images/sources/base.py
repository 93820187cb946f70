"""Where images lie: files in folders, members of tar files, rows of parquet files, or memory. One row is one image.

A source is small enough to be sent to a worker process, whatever the size of its images: it holds names and places.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tost.data.dataset import fingerprint
from tost.data.images.decode import BadImageError, read_image

__all__ = ["FileImages", "ImageSource", "MemoryImages", "Split", "TarImages", "hash_lines"]


class ImageSource:
    """Images by number."""

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, row: int) -> str:
        """Return what to call an image in messages, such as its path."""
        raise NotImplementedError

    def file_name(self, row: int) -> str:
        """Return the name under which an image was published, as far as it is known."""
        return self.name(row)

    def read(self, row: int) -> bytes:
        """Return the content of an image's file.

        Raises:
            OSError: It cannot be read.
        """
        raise NotImplementedError

    def image(self, row: int) -> Image.Image:
        """Return an image, decoded, of mode ``RGB``.

        Raises:
            BadImageError: It cannot be read.
        """
        try:
            data = self.read(row)
        except OSError as error:
            raise BadImageError(f"{self.name(row)} cannot be opened: {error.strerror or error}") from error
        return read_image(data, self.name(row))

    def fingerprint(self) -> str:
        """Return a SHA-256 that identifies the images; where they are many, their listing stands for them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split of a data set, before anything is chosen from it.

    Attributes:
        source: The images.
        targets: Their labels, int64 ``[N]``.
        class_names: In the order of the labels; empty if nobody says.
        layout: What it was read from, in a word.
        image_size: Height and width, if all images have the same by definition.
        extra: Further tensors by row.
    """

    source: ImageSource
    targets: Tensor
    layout: str
    class_names: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


class MemoryImages(ImageSource):
    """Images in memory.

    Args:
        pixels: uint8 ``[N, 1 or 3, height, width]``.
        title: What to call them in messages.
    """

    def __init__(self, pixels: Tensor, title: str) -> None:
        self.pixels, self.title = pixels, title

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.pixels)

    def name(self, row: int) -> str:
        """Return the number of an image."""
        return f"image {row} of {self.title}"

    def image(self, row: int) -> Image.Image:
        """Return an image, of mode ``RGB``."""
        return Image.fromarray(self.pixels[row].expand(3, -1, -1).permute(1, 2, 0).numpy())

    def fingerprint(self) -> str:
        """Return the SHA-256 of the pixels."""
        return fingerprint(self.pixels)


class FileImages(ImageSource):
    """Files below a folder.

    Args:
        root: The folder.
        names: Paths below it, with ``/``.
    """

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self._names = _packed(names)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._names)

    def name(self, row: int) -> str:
        """Return the path of a file."""
        return os.fspath(self.root / os.fsdecode(self._names[row]))

    def read(self, row: int) -> bytes:
        """Return the content of a file."""
        return Path(self.name(row)).read_bytes()

    def fingerprint(self) -> str:
        """Return the SHA-256 of the listing: paths below the folder, and sizes."""
        return hash_lines(f"{name}\t{self._size(name)}" for name in map(os.fsdecode, self._names))

    def _size(self, name: str) -> int:
        try:
            return (self.root / name).stat().st_size
        except OSError:
            return -1  # such as a link to nowhere, a bad image like others


class TarImages(ImageSource):
    """Members of tar files, read at their places without unpacking.

    Args:
        paths: The tar files.
        names: Names of the members.
        places: For each member the number of its file, where its content starts, and its size, int64 ``[N, 3]``.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str], places: NDArray[np.int64]) -> None:
        self.paths, self.places = list(paths), places
        self._names = _packed(names)
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._names)

    def name(self, row: int) -> str:
        """Return the path of the tar file with the name of the member."""
        return f"{self.paths[int(self.places[row, 0])]}:{os.fsdecode(self._names[row])}"

    def read(self, row: int) -> bytes:
        """Return the content of a member."""
        file, start, size = map(int, self.places[row])
        if file not in self._open:
            self._open[file] = os.open(self.paths[file], os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        # Reading at a place, not from a position, so that forked workers can share an open file.
        return os.pread(self._open[file], size, start)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the listing: names of the members, and sizes."""
        names = map(os.fsdecode, self._names)
        return hash_lines(f"{name}\t{size}" for name, size in zip(names, self.places[:, 2], strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def __del__(self) -> None:
        for handle in self.__dict__.get("_open", {}).values():
            os.close(handle)


def _packed(names: Sequence[str]) -> NDArray[np.bytes_]:
    # A million Python strings would be copied into every worker one by one, as soon as they are counted there.
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def hash_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text, in hexadecimal."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", errors="surrogateescape"))
        digest.update(b"\n")
    return digest.hexdigest()
