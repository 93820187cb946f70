"""Files: atomic writes, hashes and bounded JSON. Loads no torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tost.errors import ConfigError, StorageError, TostError

MAX_JSON_BYTES = 64 * 2**20
DRAFT_PREFIX = ".writing-"
"""Start of the names of the folders that hold files while they are written."""


@contextmanager
def atomic_path(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Write a file so that readers see the old content or the new one, never a part of it.

    Args:
        path: File to write; missing folders are created.
        sync: Flush the content to the disk before the file gets its name.

    Yields:
        A draft in the same file system. It replaces `path` when the block ends and is removed if the block raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Inside a folder of its own, the draft gets the permissions that any other new file gets.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=DRAFT_PREFIX, ignore_cleanup_errors=True) as folder:
        draft = Path(folder) / path.name
        yield draft
        if sync:
            with draft.open("rb") as file:
                os.fsync(file.fileno())
        draft.replace(path)


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Raise errors of writing as StorageError, for the duration of a ``with`` block.

    Raises:
        StorageError: The system refused: the disk is full or read-only, a folder is missing, a permission is.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {what}: {error}") from error


def remove_drafts(folder: Path) -> None:
    """Remove the drafts that a killed process left in a folder and below it. No other process may be writing there."""
    for draft in list(folder.rglob(f"{DRAFT_PREFIX}*")):
        shutil.rmtree(draft)


def write_atomic(path: Path, content: bytes | str, *, sync: bool = True) -> None:
    """Write a whole file; see `atomic_path`."""
    with atomic_path(path, sync=sync) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, *, sync: bool = True, allow_nan: bool = False) -> None:
    """Write a value as indented JSON with sorted keys; see `atomic_path`. NaN and infinity are refused by default."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=allow_nan) + "\n", sync=sync)


def read_json(
    path: Path, *, error: type[TostError] = TostError, max_bytes: int = MAX_JSON_BYTES, hint: str = ""
) -> Any:
    """Read a JSON file that may come from anywhere.

    Args:
        path: File to read.
        error: What to raise.
        max_bytes: Larger files are refused unread.
        hint: What to do about a file that cannot be read; the end of the message.

    Raises:
        TostError: Of the class `error`: the file is missing, too large, too deeply nested or not JSON.
    """
    hint = hint and f"; {hint}"
    try:
        content = read_at_most(path, max_bytes + 1)
    except OSError as problem:
        raise error(f"cannot read {path}: {problem}{hint}") from problem
    if len(content) > max_bytes:
        raise error(f"{path} is larger than {max_bytes:,} bytes, which no such file is; it was not read")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise error(f"cannot read {path}, it is not JSON: {problem}{hint}") from problem


def read_text(path: Path, what: str = "text") -> str:
    """Read a text as it is: bytes that are not UTF-8 become surrogates, which `ByteTokenizer` writes back as bytes.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8", errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"cannot read the {what} from {path}: {error.strerror}") from error


def is_utf8(path: Path) -> bool:
    """Return whether a path can be written as UTF-8; names of files may be any bytes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in str(path))


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_at_most(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, also of a device that never ends; takes no more memory than its content."""
    with path.open("rb") as file:
        return bytes(read_pieces(file, size))


def read_pieces(file: _Readable, size: int) -> bytearray:
    """Return the next bytes of a file, at most `size`; unlike `read`, takes memory for what is there only."""
    content = bytearray()
    while piece := file.read(min(size - len(content), 1 << 20)):
        content += piece
    return content


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Flush a folder, so that the names in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
