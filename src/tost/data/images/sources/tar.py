"""An index of the images in tar files, so that they can be read at their places without unpacking anything."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np

from tost.data.images.sources.base import TarImages
from tost.data.images.sources.layouts import SUFFIXES
from tost.errors import ConfigError

__all__ = ["Member", "index_tar", "tar_source"]

_LABEL_SUFFIX = ".cls"  # a file with the number of the class, beside its image


class Member(NamedTuple):
    """An image in a tar file.

    Attributes:
        file: Number of the tar file.
        name: Path of the image in it; in a tar file inside a tar file, behind the inner one's name.
        folder: What it is sorted into: the folder or the inner tar file; empty if neither.
        start: Where its content starts, in bytes from the beginning of the outer file.
        size: In bytes.
        label: Number of its class, if a ``.cls`` file beside it tells.
    """

    file: int
    name: str
    folder: str
    start: int
    size: int
    label: int | None


def index_tar(paths: Sequence[Path]) -> list[Member]:
    """List the images in tar files, and in tar files inside them, sorted by file and name.

    Args:
        paths: The tar files; they must not be compressed.

    Raises:
        ConfigError: One is compressed, damaged or cut off.
    """
    found: list[Member] = []
    for number, path in enumerate(paths):
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                members = [*_members(stream, number, "")]
                if beyond := [one.name for one in members if one.start + one.size > size]:
                    raise tarfile.ReadError(f"it ends before {beyond[0]} does")
        except (tarfile.TarError, OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read as a tar file: {error}; it must be complete, and not compressed, because "
                "images are read from their places in it."
            ) from error
        found += sorted(members, key=lambda one: one.name)
    return found


def _members(stream: IO[bytes], number: int, outer: str) -> Iterator[Member]:
    labels: dict[str, int] = {}
    images: list[tuple[str, int, int]] = []
    # Opened where the stream stands, a tar file counts places from the beginning of the stream.
    with tarfile.TarFile(fileobj=stream) as archive:
        for entry in archive:
            path = PurePosixPath(entry.name)
            if not entry.isfile() or path.name.startswith("."):
                continue
            if path.suffix == ".tar":
                stream.seek(entry.offset_data)
                yield from _members(stream, number, str(path))
            elif path.suffix == _LABEL_SUFFIX:
                stream.seek(entry.offset_data)
                labels[str(path.with_suffix(""))] = int(stream.read(entry.size))
            elif path.suffix.lower() in SUFFIXES:
                images.append((str(path), entry.offset_data, entry.size))
        # The reader takes any end for the end, also that of a download that broke off.
        stream.seek(archive.offset)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"{outer or 'it'} breaks off without the mark of its end")
    for name, start, size in images:
        path = PurePosixPath(name)
        folder = path.parent.name or PurePosixPath(outer).stem
        full = f"{outer}/{name}" if outer else name
        yield Member(number, full, folder, start, size, labels.get(str(path.with_suffix(""))))


def tar_source(paths: Sequence[Path], members: Sequence[Member]) -> TarImages:
    """Return the images of an index.

    Args:
        paths: The tar files.
        members: What `index_tar` found in them.
    """
    places = np.array([(one.file, one.start, one.size) for one in members], dtype=np.int64).reshape(-1, 3)
    return TarImages(paths, [one.name for one in members], places)
