"""Untrusted tar files, read forward, one header at a time, without unpacking."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from tost.errors import ConfigError

_LONGEST_HEADER = 1 << 20  # bytes; the longest are those that hold a long name


class TarEntry(NamedTuple):
    """A file in a tar file.

    Attributes:
        path: Its name.
        start: Where its content starts, in bytes from the beginning of the outermost file.
        size: In bytes.
    """

    path: PurePosixPath
    start: int
    size: int


@contextmanager
def open_tar(path: Path) -> Iterator[TarPart]:
    """Open a tar file; errors in the ``with`` block are raised as ConfigError.

    Raises:
        ConfigError: It is compressed, damaged or cut off.
    """
    try:
        with path.open("rb") as stream:
            yield TarPart(stream, 0, os.fstat(stream.fileno()).st_size)
    except (tarfile.TarError, OSError, ValueError, OverflowError, LookupError, RecursionError) as error:
        if isinstance(error, (ConfigError, UnicodeDecodeError)):
            raise
        raise ConfigError(
            f"{path} cannot be read as a tar file: {error}; it must be complete, and not compressed, because files are "
            "read from their places in it."
        ) from error


class TarPart:
    """A part of a file that is a tar file, as `tarfile` reads it: a few bytes at a time, and not beyond its end.

    Args:
        stream: The file; places are counted from its beginning.
        start: Where the part begins.
        stop: Where it ends.
    """

    def __init__(self, stream: IO[bytes], start: int, stop: int) -> None:
        self.stream, self.start, self.stop = stream, start, stop

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most the size of the largest header."""
        if not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"one of its headers states a size of {size:,} bytes")
        return self.stream.read(max(0, min(size, self.stop - self.stream.tell())))

    def seek(self, place: int) -> None:
        """Go to a place."""
        if not self.start <= place <= self.stop:
            raise tarfile.ReadError("it breaks off, or a header states a wrong size")
        self.stream.seek(place)

    def tell(self) -> int:
        """Return the current place."""
        return self.stream.tell()

    def content(self, entry: TarEntry) -> bytes:
        """Return the content of an entry."""
        self.stream.seek(entry.start)
        return self.stream.read(entry.size)

    def inner(self, entry: TarEntry) -> TarPart:
        """Return an entry that is a tar file itself."""
        return TarPart(self.stream, entry.start, entry.start + entry.size)

    def entries(self) -> Iterator[TarEntry]:
        """Return its files in order, without hidden ones.

        Raises:
            tarfile.ReadError: It is damaged or cut off.
        """
        self.seek(self.start)
        # Opened where the stream stands, a tar file counts places from the beginning of the stream.
        with tarfile.TarFile(fileobj=self) as archive:  # type: ignore[arg-type] # it reads, seeks and tells
            for entry in archive:
                if entry.size < 0 or entry.offset_data + entry.size > self.stop:
                    raise tarfile.ReadError(f"it ends before {entry.name} does, which has {entry.size:,} bytes")
                path = PurePosixPath(entry.name)
                if entry.isfile() and not path.name.startswith("."):
                    yield TarEntry(path, entry.offset_data, entry.size)
            # The reader does not notice a file that is cut off, such as an incomplete download.
            self.seek(archive.offset)
            if self.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it breaks off without the mark of its end")
