"""Parquet files and data sets of the Hugging Face hub; errors of their libraries are raised as ConfigError."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from tost._text import did_you_mean
from tost.errors import ConfigError

_ROWS = 1024  # that are unpacked at once
_AT_ONCE = 1 << 26  # bytes that they may have
_MOST_PACKED, _SMALL = 100, 1 << 28  # a column unpacks to so many times the size of its files, or to so many bytes


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a parquet file; errors in the ``with`` block are raised as ConfigError.

    Yields:
        ``pyarrow.parquet.ParquetFile``.

    Raises:
        ConfigError: It is damaged, or something else.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(path) as file:
            facts = file.metadata
            rows = sum(facts.row_group(index).num_rows for index in range(facts.num_row_groups))
            if rows != facts.num_rows:
                raise ConfigError(f"{path} states {facts.num_rows} rows, but its groups {rows}; it is damaged.")
            yield file
    except (pa.ArrowException, OSError, UnicodeError, OverflowError, LookupError) as error:
        raise ConfigError(f"{path} cannot be read as a parquet file: {error}") from error


def columns_of(path: Path) -> list[str]:
    """Return the names of the columns of a parquet file."""
    with open_parquet(path) as file:
        return list(file.schema_arrow.names)


def read_column(paths: Sequence[Path], column: str, *, limit: int = 1 << 30) -> Any:
    """Return a column of parquet files, or with a dot a field of one.

    A few bytes can stand for any number of long values. So sizes are checked before anything is unpacked, and rows are
    read a few at a time: as many as stay small even if each were as long as all that its group states.

    Args:
        paths: The files, in order.
        column: Its name.
        limit: Bytes that it may have in memory; less for small files.

    Returns:
        ``pyarrow.ChunkedArray``; an empty one if there is no such column.

    Raises:
        ConfigError: A file cannot be read, holds too much, or the files hold different types.
    """
    import pyarrow as pa

    chunks, size = [], 0
    limit = min(limit, max(_SMALL, _MOST_PACKED * sum(path.stat().st_size for path in paths)))
    for path in paths:
        with open_parquet(path) as file:
            groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
            parts = [group.column(index) for group in groups for index in range(group.num_columns)]
            inside = [part for part in parts if f"{part.path_in_schema}.".startswith(f"{column}.")]
            largest = max((part.total_uncompressed_size for part in inside), default=1)
            too_large = largest > limit or file.metadata.num_rows > limit // 8
            chunks += file.read_row_groups([], columns=[column]).columns  # nothing yet but the type
            rows = 0
            at_once = max(1, min(_ROWS, _AT_ONCE // max(1, largest)))
            for batch in () if too_large else file.iter_batches(at_once, columns=[column]):
                rows += len(batch)
                for part in batch.columns:
                    part.validate(full=True)
                    chunks.append(part)
                    size += part.nbytes
                if too_large := size > limit:
                    break
            if too_large:
                raise ConfigError(
                    f"column {column!r} of {path} unpacks to more than {limit:,} bytes; the file is damaged, or made "
                    "to fill the memory."
                )
            if rows != file.metadata.num_rows:
                raise ConfigError(
                    f"column {column!r} of {path} has {rows} rows, but {file.metadata.num_rows} are stated; "
                    "the file is damaged."
                )
    if len(types := sorted({str(chunk.type) for chunk in chunks})) > 1:
        raise ConfigError(
            f"column {column!r} holds {' and '.join(types)} in the files of {paths[0].parent}; it must have one type."
        )
    return pa.chunked_array(
        [chunk for chunk in chunks if isinstance(chunk, pa.Array)], type=chunks[0].type if chunks else pa.null()
    )


def check_columns(wanted: Iterable[str], there: Sequence[str], where: object, advice: str = "") -> None:
    """Refuse a table that lacks a column.

    Args:
        wanted: Columns that it must have.
        there: Those that it has.
        where: The table, for the message.
        advice: What to do about it, the end of the message.

    Raises:
        ConfigError: A column is missing.
    """
    if missing := [name for name in wanted if name not in there]:
        named, guess = " and no column ".join(map(repr, missing)), did_you_mean(missing[0], there)
        raise ConfigError(
            f"{where} has no column {named}; {guess}its columns are: {', '.join(there) or 'none'}.{advice}"
        )


def unreachable() -> str:
    """Return why the hub cannot be reached; empty if it can be, or if only a proxy knows."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    if getproxies():
        return ""
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=3):
            return ""
    except OSError as error:
        return f"{address.hostname} cannot be reached ({error})"


def load_hub(name: str, config: str | None = None, *, remedy: str, **settings: Any) -> Any:
    """Load a data set of the hub, which `datasets` downloads once.

    If the hub cannot be reached, only the cache is tried, because the library would retry for half a minute.

    Args:
        name: Such as ``"stanfordnlp/imdb"``.
        config: Its configuration, if it has several.
        remedy: What to do if that fails, the end of the message.
        settings: Of `datasets.load_dataset`: the split, or the revision.

    Raises:
        ConfigError: It cannot be loaded.
    """
    import datasets
    from huggingface_hub import constants

    reason, before = unreachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(reason)
    try:
        return datasets.load_dataset(name, config, **settings)
    except Exception as error:  # of the network, of the hub, of the files: each library has its own
        problem = f"it is not on this machine, and {reason}" if reason else str(error)
        raise ConfigError(f"{name} cannot be loaded from the hub: {problem}; {remedy}") from error
    finally:
        constants.HF_HUB_OFFLINE = before
