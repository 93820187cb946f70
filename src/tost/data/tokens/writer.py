"""Writing files of tokens: a file gets its name once it is complete."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tost._io import atomic_path, write_atomic
from tost.data.tokens.options import FileRecord, ShardRecord


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type that holds ids below `vocab_size`: uint8, uint16 or uint32, little-endian."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Appends tokens to a file; see `write_shard`.

    Attributes:
        record: Sizes and checksums, once both files are complete.
    """

    record: ShardRecord

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype, self._digest = file, dtype, hashlib.sha256()
        self._size = self._document_start = 0
        self._lengths: list[int] = []

    def add(self, ids: NDArray[Any]) -> None:
        """Append tokens to the current document."""
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._size += len(content)

    def end_document(self) -> None:
        """Let the next token begin a document."""
        self._lengths.append((self._size - self._document_start) // self._dtype.itemsize)
        self._document_start = self._size

    def _finish(self, path: Path) -> None:
        lengths = np.array(self._lengths, dtype="<u8").tobytes()
        beside = path.with_suffix(".lengths")
        write_atomic(beside, lengths, sync=False)
        self.record = ShardRecord(
            tokens=self._size // self._dtype.itemsize,
            documents=len(self._lengths),
            data=FileRecord(file=path.name, size=self._size, sha256=self._digest.hexdigest()),
            lengths=FileRecord(file=beside.name, size=len(lengths), sha256=hashlib.sha256(lengths).hexdigest()),
        )


@contextmanager
def write_shard(path: Path, dtype: np.dtype[Any]) -> Iterator[ShardWriter]:
    """Write a file of tokens, and one with the lengths of its documents.

    Args:
        path: File of tokens; that of the lengths has the ending ``.lengths``.
        dtype: How tokens are stored.

    Yields:
        A writer, which has a `record` after the block. No file is written if the block raises.
    """
    with atomic_path(path) as draft, draft.open("wb") as file:
        writer = ShardWriter(file, dtype)
        yield writer
    writer._finish(path)
