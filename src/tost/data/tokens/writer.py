"""Files of tokens, written so that a file with its final name is complete."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tost.data.tokens.format import FileRecord, ShardRecord

__all__ = ["ShardWriter", "hash_file", "merge_shards"]

_BLOCK = 1 << 20


class ShardWriter:
    """A file of tokens that grows, and one with the lengths of its documents.

    Args:
        path: The file of tokens; the lengths lie beside it. Both have these names once they are complete.
        dtype: How tokens are stored.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path, self._dtype = path, dtype
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._digest = hashlib.sha256()
        self._tokens = self._open = 0
        self._lengths: list[int] = []
        self._file = self._temporary.open("wb")

    def add(self, ids: NDArray[Any]) -> None:
        """Append tokens to the document that is open."""
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._tokens += len(ids)
        self._open += len(ids)

    def end_document(self) -> None:
        """Let the next token begin a document."""
        self._lengths.append(self._open)
        self._open = 0

    def finish(self) -> ShardRecord:
        """Put the files in their places, which is the last thing to happen to them."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        lengths = np.array(self._lengths, dtype="<u8").tobytes()
        beside = self._path.with_name(f"{self._path.stem}.lengths")
        self._temporary.replace(self._path)
        _write(beside, lengths)
        return ShardRecord(
            tokens=self._tokens,
            documents=len(self._lengths),
            data=FileRecord(
                file=self._path.name, size=self._tokens * self._dtype.itemsize, sha256=self._digest.hexdigest()
            ),
            lengths=FileRecord(file=beside.name, size=len(lengths), sha256=hashlib.sha256(lengths).hexdigest()),
        )

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def merge_shards(folder: Path, shards: list[ShardRecord], path: Path) -> ShardRecord:
    """Write shards of a folder one after another into one.

    Args:
        folder: Where they are.
        shards: Which, in order.
        path: File to write.
    """
    digest, lengths = hashlib.sha256(), b""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as target:
        for shard in shards:
            with (folder / shard.data.file).open("rb") as file:
                while block := file.read(_BLOCK):
                    target.write(block)
                    digest.update(block)
            lengths += (folder / shard.lengths.file).read_bytes()
        target.flush()
        os.fsync(target.fileno())
    beside = path.with_name(f"{path.stem}.lengths")
    _write(beside, lengths)
    temporary.replace(path)
    return ShardRecord(
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        data=FileRecord(file=path.name, size=sum(shard.data.size for shard in shards), sha256=digest.hexdigest()),
        lengths=FileRecord(file=beside.name, size=len(lengths), sha256=hashlib.sha256(lengths).hexdigest()),
    )


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
