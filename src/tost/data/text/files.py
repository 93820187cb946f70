"""Reading plain text, jsonl and parquet files, and data sets of the hub, in bounded memory.

A `Span` is a part of a file that one process reads: a range of bytes that begins and ends between lines, a range of row
groups, of rows, or a whole file.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tost.data._tables import check_columns, open_parquet
from tost.errors import ConfigError

Kind = Literal["text", "lines", "jsonl", "parquet", "hub"]
Row = Mapping[str, Any]
Hub = Mapping[str, Any]
"""Data sets of the hub by split."""

_TEXT = (".txt", ".text", ".raw", ".tokens")
_JSONL = (".jsonl", ".ndjson")
_SPLIT = re.compile(r"(?:^|[._-])(train|training|valid|validation|val|dev|development|test)(?=[._-]|$)")
_SPLITS = {"train": "train", "training": "train", "test": "test"}
_BLOCK = 1 << 20
_ROWS = 512


class Span(NamedTuple):
    """A part of a source.

    Attributes:
        file: Path of the file, or the split of a hub data set.
        kind: How it is read.
        start: First byte, row group or row.
        stop: The one after the last.
        rows: Documents in it.
        first_line: Number of its first line, from 1, for messages.
    """

    file: str
    kind: Kind
    start: int
    stop: int
    rows: int
    first_line: int = 1


def kind_of(path: Path, *, lines: bool) -> Kind | None:
    """Return how a file is read, by the end of its name; None for an unknown one.

    Args:
        path: The file.
        lines: Whether every line of a plain text is a document.
    """
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() in _JSONL:
        return "jsonl"
    if suffix.lower() == ".parquet":
        return "parquet"
    return ("lines" if lines else "text") if suffix.lower() in _TEXT else None


def find_files(source: str) -> list[Path]:
    """Return the files of a source, in the order of their paths.

    Args:
        source: A file, or a folder that is searched with all below it.

    Raises:
        ConfigError: There are none.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"the source {source} does not exist; give a file, a folder, or hub:NAME where that is possible."
        )
    every = (file for file in path.rglob("*") if file.is_file())
    visible = (file for file in every if not any(part.startswith(".") for part in file.relative_to(path).parts))
    known = (file for file in visible if kind_of(file, lines=True))
    found = sorted(known, key=lambda file: file.relative_to(path).parts)
    if not found:
        endings = ", ".join((*_TEXT, *_JSONL, ".parquet"))
        raise ConfigError(
            f"the source {source} holds no text; files are known by their endings: {endings}, and .gz of them."
        )
    return found


def split_of_name(path: Path, root: Path) -> str | None:
    """Return the split in the name of a file or of a folder it is in, up to `root`: train, validation or test.

    None if there is none.
    """
    parts = path.relative_to(root).parts if path != root else (path.name,)
    for part in reversed(parts):
        if found := _SPLIT.findall(part.lower()):
            return _SPLITS.get(found[-1], "validation")
    return None


def plan_file(path: Path, kind: Kind, size: int) -> list[Span]:
    """Cut a file into spans of about `size` bytes and count their documents.

    The cuts depend on the file and on `size` only.

    Raises:
        ConfigError: It cannot be read as what it is.
    """
    if kind == "text":
        return [Span(str(path), kind, 0, path.stat().st_size, 1)]
    if kind == "parquet":
        return _plan_parquet(path, size)
    spans: list[Span] = []
    start = place = rows = 0
    line_number = first_line = 1
    with _open_binary(path) as file:
        for line in file:
            place += len(line)
            line_number += 1
            rows += kind == "lines" or not line.isspace()
            # Packed files have no places to start from: they stay in one piece.
            if place - start >= size and path.suffix != ".gz":
                spans.append(Span(str(path), kind, start, place, rows, first_line))
                start, rows, first_line = place, 0, line_number
    if place > start:
        spans.append(Span(str(path), kind, start, place, rows, first_line))
    return spans


def _plan_parquet(path: Path, size: int) -> list[Span]:
    with open_parquet(path) as file:
        metadata = file.metadata
    spans: list[Span] = []
    start = rows = held = 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        held += metadata.row_group(group).total_byte_size
        if held >= size or group == metadata.num_row_groups - 1:
            spans.append(Span(str(path), "parquet", start, group + 1, rows))
            start, rows, held = group + 1, 0, 0
    return spans


def read_rows(span: Span, columns: Iterable[str], hub: Hub, errors: str) -> Iterator[Row]:
    """Return the documents of a span, one after another.

    Args:
        span: Part of the source to read.
        columns: Keys or columns to take; a plain text has one column, whose name does not matter.
        hub: Data sets of the hub by split.
        errors: Handling of bytes that are not UTF-8: ``strict`` or ``surrogateescape``.

    Yields:
        Values by column. The text of a whole file comes as an iterator of blocks.

    Raises:
        ConfigError: A line or a value is not what it should be, or a column is missing.
    """
    wanted = list(columns)
    if span.kind == "hub":
        yield from _read_hub(span, wanted, hub[span.file])
    elif span.kind == "parquet":
        yield from _read_parquet(span, wanted)
    elif span.kind == "text":
        yield {wanted[0]: _read_blocks(Path(span.file), errors)}
    else:
        yield from _read_lines(span, wanted, errors)


@contextmanager
def _open_binary(path: Path) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc] # a packed file reads like any other
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is damaged or not complete: {error}; get it again.") from error


def _read_blocks(path: Path, errors: str) -> Iterator[str]:
    with _open_binary(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", errors=errors, newline="") as file:
        try:
            while block := file.read(_BLOCK):
                yield block
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: {_not_utf8(error)}") from error


def lines_of(blocks: Iterable[str]) -> Iterator[str]:
    """Return the lines of a text that comes in blocks of any size, each with the line feed that ends it."""
    held = ""
    for block in blocks:
        *complete, held = (held + block).split("\n")
        yield from (f"{line}\n" for line in complete)
    if held:
        yield held


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} is not UTF-8; convert the file, or use tokenizer=bytes."


def _read_lines(span: Span, columns: list[str], errors: str) -> Iterator[Row]:
    with _open_binary(Path(span.file)) as file:
        file.seek(span.start)
        left, number = span.stop - span.start, span.first_line - 1
        while left > 0:
            line = file.readline()
            left -= len(line)
            number += 1
            if not line:
                raise ConfigError(f"{span.file} is shorter than it was before; leave it alone while it is read.")
            if span.kind == "jsonl" and line.isspace():
                continue
            try:
                text = line.decode("utf-8", errors=errors)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{span.file}, line {number}: {_not_utf8(error)}") from error
            yield {columns[0]: text} if span.kind == "lines" else _parse(text, columns, f"{span.file}, line {number}")


def _parse(text: str, columns: list[str], place: str) -> Row:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: not valid JSON ({error}); every line must hold one object.") from error
    if not isinstance(row, dict):
        raise ConfigError(f'{place}: holds a {type(row).__name__}, not an object; write lines like {{"text": ...}}.')
    for column in columns:
        if column not in row:
            raise ConfigError(f"{place}: has no key {column!r}; its keys are: {', '.join(row) or 'none'}. Set column.")
    return {column: row[column] for column in columns}


def _read_parquet(span: Span, columns: list[str]) -> Iterator[Row]:
    with open_parquet(Path(span.file)) as file:
        check_columns(columns, file.schema_arrow.names, span.file, " Set column.")
        for batch in file.iter_batches(_ROWS, row_groups=range(span.start, span.stop), columns=columns):
            yield from batch.to_pylist()


def _read_hub(span: Span, columns: list[str], data: Any) -> Iterator[Row]:
    check_columns(columns, data.column_names, f"split {span.file} of the hub data set", " Set column.")
    for start in range(span.start, span.stop, _ROWS):
        values = data[start : min(start + _ROWS, span.stop)]
        for row in zip(*(values[column] for column in columns), strict=True):
            yield dict(zip(columns, row, strict=True))
