"""Images in tar files, which are indexed once and read at their places, without unpacking."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tost.data._tar import TarEntry, TarPart, open_tar
from tost.data.images.sources.base import ImageSource, check_size, hash_lines, is_image, pack_names

_LABEL_SUFFIX = ".cls"  # a file with the number of the class, beside its image
_LABEL_BYTES = 16


class Member(NamedTuple):
    """An image in a tar file.

    Attributes:
        file: Number of the tar file.
        name: Path of the image in it; in a tar file inside a tar file, after the inner one's name.
        folder: What it is sorted into: the folder or the inner tar file; empty if neither.
        start: Where its content starts, in bytes from the beginning of the outer file.
        size: In bytes.
        label: Number of its class, if there is a ``.cls`` file beside it.
    """

    file: int
    name: str
    folder: str
    start: int
    size: int
    label: int | None


class TarImages(ImageSource):
    """Members of tar files, read at their places without unpacking.

    Args:
        paths: The tar files.
        names: Names of the members.
        places: For each member the number of its file, where its content starts, and its size, int64 ``[N, 3]``.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str], places: NDArray[np.int64]) -> None:
        self.paths, self.places = list(paths), places
        self._names = pack_names(names)
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
        check_size(size)
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


def index_tar(paths: Sequence[Path]) -> list[Member]:
    """List the images in tar files, and in tar files inside them, sorted by file and name.

    Args:
        paths: The tar files; they must not be compressed.

    Raises:
        ConfigError: One is compressed, damaged or cut off.
    """
    found: list[Member] = []
    for number, path in enumerate(paths):
        with open_tar(path) as archive:
            found += sorted(_members(archive, number, ""), key=lambda one: one.name)
    return found


def _members(archive: TarPart, number: int, outer: str) -> Iterator[Member]:
    labels: dict[str, int] = {}
    images: list[TarEntry] = []
    for entry in archive.entries():
        if entry.path.suffix == ".tar":
            if outer:
                raise tarfile.ReadError(f"{outer} holds {entry.path.name}; one tar file in another is the most")
            yield from _members(archive.inner(entry), number, str(entry.path))
        elif entry.path.suffix == _LABEL_SUFFIX:
            text = archive.content(entry._replace(size=min(entry.size, _LABEL_BYTES + 1)))
            labels[str(entry.path.with_suffix(""))] = _label(text, entry.path)
        elif is_image(entry.path.name):
            images.append(entry)
    for path, start, size in images:
        folder = path.parent.name or PurePosixPath(outer).stem
        full = f"{outer}/{path}" if outer else str(path)
        yield Member(number, full, folder, start, size, labels.get(str(path.with_suffix(""))))


def _label(text: bytes, path: PurePosixPath) -> int:
    digits = text.strip()
    if len(text) > _LABEL_BYTES or not digits.isdigit():
        raise tarfile.ReadError(f"{path} holds {text[:_LABEL_BYTES]!r}, which is not the number of a class")
    return int(digits)


def tar_source(paths: Sequence[Path], members: Sequence[Member]) -> TarImages:
    """Return the images of an index.

    Args:
        paths: The tar files.
        members: What `index_tar` found in them.
    """
    places = np.array([(one.file, one.start, one.size) for one in members], dtype=np.int64).reshape(-1, 3)
    return TarImages(paths, [one.name for one in members], places)
