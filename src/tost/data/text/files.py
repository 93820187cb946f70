"""Reading text out of files of many formats, and out of tables of `datasets`, in bounded memory.

A `Span` is a part of a file that one process reads: a range of bytes that begins and ends between lines, a range of row
groups, of rows, or a whole file.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

from tost._io import read_pieces
from tost._text import did_you_mean
from tost.data._tables import check_columns, open_parquet
from tost.data._tar import open_tar
from tost.errors import ConfigError

Format = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "tar"]
Kind = Literal["lines", "hub"] | Format
Row = Mapping[str, Any]
Hub = Mapping[str, Any]
"""Tables of `datasets` by split."""

_ENDINGS: dict[str, Format] = {
    **dict.fromkeys((".txt", ".text", ".raw", ".tokens"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{f".{format}": format for format in get_args(Format)[2:]},
}
_PACKED = (".gz", ".xz", ".zst")
_SPLIT = re.compile(r"(?:^|[._-])(train|training|valid|validation|val|dev|development|test)(?=[._-]|$)")
_SPLITS = {"train": "train", "training": "train", "test": "test"}
_SET_COLUMN = " Set column."
_BLOCK = 1 << 20
_ROWS = 512
_LONGEST = 1 << 28  # bytes of a line, of a document in a tar file, or of a file that is read at once


class Span(NamedTuple):
    """A part of a source.

    Attributes:
        file: Path of the file, or the split of a data set.
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


def format_of(path: Path) -> Format | None:
    """Return the format of a file by the end of its name; None for an unknown one."""
    suffix = Path(path.stem).suffix if path.suffix.lower() in _PACKED else path.suffix
    found = _ENDINGS.get(suffix.lower())
    return None if found in ("parquet", "tar") and suffix != path.suffix else found


def find_files(source: str, format: str = "auto") -> list[tuple[Path, Format]]:
    """Return the files of a source with their formats, in the order of their paths.

    Args:
        source: A file, or a folder that is searched with all below it.
        format: Format of all files; ``auto`` goes by their endings, and skips files of a folder without a known one.

    Raises:
        ConfigError: There are none, or the ending of the only one is not known.
    """
    path = Path(source)
    if path.is_file():
        return [(path, _known_format(path, format))]
    if not path.is_dir():
        raise ConfigError(
            f"the source {source} does not exist; give a file, a folder, or hub:NAME where that is possible."
        )
    every = (file for file in path.rglob("*") if file.is_file())
    visible = (file for file in every if not any(part.startswith(".") for part in file.relative_to(path).parts))
    ordered = sorted(visible, key=lambda file: file.relative_to(path).parts)
    if format != "auto":
        known = [(file, _known_format(file, format)) for file in ordered]
    else:
        known = [(file, found) for file in ordered if (found := format_of(file))]
        # Beside other files, .json describes them.
        known = [entry for entry in known if entry[1] != "json"] or known
    if not known:
        raise ConfigError(f"the source {source} holds no text; {_endings()}.")
    return known


def _known_format(path: Path, format: str) -> Format:
    found = format_of(path) if format == "auto" else format
    if found is None:
        last = "".join(path.suffixes[-2:]) if path.suffix.lower() in _PACKED else path.suffix
        raise ConfigError(
            f"{path}: the ending {last or 'of a name without one'!r} is not known; {did_you_mean(last, _ENDINGS)}"
            f"{_endings()}. If it is plain text, add format=text."
        )
    return found  # type: ignore[return-value] # options allow nothing else


def _endings() -> str:
    return (
        f"files are known by their endings: {', '.join(_ENDINGS)}; text, json and csv also with {', '.join(_PACKED)} "
        "behind"
    )


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
    if kind not in ("parquet", "tar"):
        _refuse_utf16(path)
    if kind == "text":
        return [Span(str(path), kind, 0, path.stat().st_size, 1)]
    if kind == "parquet":
        return _plan_parquet(path, size)
    if kind == "json" and _is_jsonl(path):
        kind = "jsonl"
    if kind not in ("lines", "jsonl"):
        rows = sum(1 for _ in _READERS[kind](path, None, "surrogateescape"))
        return [Span(str(path), kind, 0, path.stat().st_size, rows)] if rows else []
    spans: list[Span] = []
    start = place = rows = 0
    line_number = first_line = 1
    with _open_binary(path) as file:
        for line in _lines(file, path):
            place += len(line)
            line_number += 1
            rows += kind == "lines" or not line.isspace()
            # Packed files have no places to start from: they stay in one piece.
            if place - start >= size and path.suffix.lower() not in _PACKED:
                spans.append(Span(str(path), kind, start, place, rows, first_line))
                start, rows, first_line = place, 0, line_number
    if place > start:
        spans.append(Span(str(path), kind, start, place, rows, first_line))
    return spans


def _refuse_utf16(path: Path) -> None:
    with _open_binary(path) as file:
        mark = file.read(2)
    if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ConfigError(
            f"{path} begins as UTF-16 does, but text is read as UTF-8; convert it, such as with `iconv -f UTF-16 -t "
            "UTF-8`."
        )


def _is_jsonl(path: Path) -> bool:
    """Return whether a .json file holds one object to a line, as many do."""
    with _open_binary(path) as file:
        first, second = file.readline(_LONGEST), file.readline(_LONGEST)
    try:
        return bool(second.strip()) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


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
        hub: Tables of `datasets` by split.
        errors: Handling of bytes that are not UTF-8: ``strict`` or ``surrogateescape``.

    Yields:
        Values by column. The text of a whole file comes as an iterator of blocks.

    Raises:
        ConfigError: A line or a value is not what it should be, or a column is missing.
    """
    wanted = list(columns)
    if span.kind == "hub":
        yield from _read_table(span, wanted, hub[span.file])
    elif span.kind == "parquet":
        yield from _read_parquet(span, wanted)
    elif span.kind == "text":
        yield {wanted[0]: _read_blocks(Path(span.file), errors)}
    elif span.kind in ("lines", "jsonl"):
        yield from _read_lines(span, wanted, errors)
    else:
        yield from _READERS[span.kind](Path(span.file), wanted, errors)


@contextmanager
def _open_binary(path: Path) -> Iterator[IO[bytes]]:
    try:
        with _unpacked(path) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"{path} is damaged or not complete: {error}; get it again.") from error


def _unpacked(path: Path) -> Any:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case ".zst":
            return _open_zstandard(path)
    return path.open("rb")


def _open_zstandard(path: Path) -> Any:
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            f"{path} is unpacked by pyarrow; run `pip install 'tost-transformer[language]'`, or unpack it."
        ) from error

    class Reader(io.RawIOBase):
        """Bytes of a packed file; a damaged one says so as those of the standard library do."""

        def __init__(self) -> None:
            self.stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            try:
                data = self.stream.read(len(buffer))
            except OSError as error:
                raise EOFError(str(error)) from error
            buffer[: len(data)] = data
            return len(data)

    return io.BufferedReader(Reader(), _BLOCK)


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := file.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise ConfigError(f"{path} has a line of more than {_LONGEST:,} bytes; it is damaged, or no text.")
        yield line


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
    path = Path(span.file)
    with _open_binary(path) as file:
        if span.start:
            file.seek(span.start)
        left, number = span.stop - span.start, span.first_line - 1
        for line in _lines(file, path):
            left -= len(line)
            number += 1
            if span.kind == "lines" or not line.isspace():
                place = f"{span.file}, line {number}"
                text = _decode(line, errors, place)
                yield {columns[0]: text} if span.kind == "lines" else _pick(_parse(text, place), columns, place)
            if left <= 0:
                return
        raise ConfigError(f"{span.file} is shorter than it was before; leave it alone while it is read.")


def _decode(data: bytes, errors: str, place: str) -> str:
    try:
        return data.decode("utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: {_not_utf8(error)}") from error


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))  # some programs begin a file with a byte order mark
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON ({error}); every line must hold one object.") from error


def _pick(row: Any, columns: list[str] | None, place: str) -> Row:
    """Return some columns of an object; all of it if it is only counted."""
    if not isinstance(row, dict):
        raise ConfigError(f'{place}: holds a {type(row).__name__}, not an object; write it like {{"text": ...}}.')
    for column in columns or ():
        if column not in row:
            guess = did_you_mean(column, row)
            raise ConfigError(
                f"{place}: has no key {column!r}; {guess}its keys are: {', '.join(row) or 'none'}.{_SET_COLUMN}"
            )
    return row if columns is None else {column: row[column] for column in columns}


def _read_json(path: Path, columns: list[str] | None, errors: str) -> Iterator[Row]:
    """Read a list of objects, or an object that holds one."""
    with _open_binary(path) as file:
        data = bytes(read_pieces(file, _LONGEST + 1))
    if len(data) > _LONGEST:
        raise ConfigError(
            f"{path} has more than {_LONGEST:,} bytes, too many to be read at once; convert it to .jsonl."
        )
    found = _parse(_decode(data, errors, str(path)), str(path)) if data.strip() else []
    lists = [value for value in found.values() if isinstance(value, list)] if isinstance(found, dict) else []
    if len(lists) == 1 and "".join(columns or ()) not in found:
        found = lists[0]
    for number, row in enumerate(found if isinstance(found, list) else [found], 1):
        yield _pick(row, columns, f"{path}, entry {number}")


def _read_csv(path: Path, columns: list[str] | None, errors: str, delimiter: str = ",") -> Iterator[Row]:
    """Read a table whose first line names the columns."""
    csv.field_size_limit(_LONGEST)
    with _open_binary(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors, newline="") as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            if columns is not None and names:
                check_columns(columns, names, path, _other_delimiter(names, delimiter) or _SET_COLUMN)
                if twice := [name for name in columns if names.count(name) > 1]:
                    raise ConfigError(
                        f"{path} has the column {twice[0]!r} {names.count(twice[0])} times; rename all but one."
                    )
            for row in rows:
                if not names:
                    raise csv.Error("the first line names no columns")
                if len(row) != len(names):
                    raise csv.Error(f"it has {len(row)} fields, but the first line names {len(names)} columns")
                yield dict(zip(names, row, strict=True))
        except csv.Error as error:
            raise ConfigError(f"{path}, line {rows.line_num}: not a row of a table ({error}).") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: {_not_utf8(error)}") from error


def _other_delimiter(names: list[str], delimiter: str) -> str:
    """Return what to do about a first line that is separated by something else; nothing if it is not."""
    if len(names) != 1 or not (found := [mark for mark in ",;\t|" if mark in names[0] and mark != delimiter]):
        return ""
    known = {",": " Add format=csv.", "\t": " Add format=tsv."}
    default = " Convert it: .csv is separated by commas, .tsv by tabs."
    return f" They seem to be separated by {found[0]!r}.{known.get(found[0], default)}"


def _read_tar(path: Path, columns: list[str] | None, errors: str) -> Iterator[Row]:
    """Read the samples of a webdataset: files called ``<key>.txt``, or ``<key>.json`` with an object."""
    with open_tar(path) as archive:
        for entry in archive.entries():
            if (format := _ENDINGS.get(entry.path.suffix.lower())) not in ("text", "json"):
                continue
            place = f"{path}, {entry.path}"
            if entry.size > _LONGEST:
                raise ConfigError(f"{place} has {entry.size:,} bytes; texts of more than {_LONGEST:,} are not read.")
            text = _decode(archive.content(entry), errors, place)
            if format == "json":
                yield _pick(_parse(text, place), columns, place)
            else:
                yield {(columns or [""])[0]: text}


_READERS: dict[str, Callable[[Path, list[str] | None, str], Iterator[Row]]] = {
    **{"json": _read_json, "csv": _read_csv, "tsv": partial(_read_csv, delimiter="\t"), "tar": _read_tar}
}


def _read_parquet(span: Span, columns: list[str]) -> Iterator[Row]:
    with open_parquet(Path(span.file)) as file:
        check_columns(columns, file.schema_arrow.names, span.file, _SET_COLUMN)
        for batch in file.iter_batches(_ROWS, row_groups=range(span.start, span.stop), columns=columns):
            yield from batch.to_pylist()


def _read_table(span: Span, columns: list[str], data: Any) -> Iterator[Row]:
    check_columns(columns, data.column_names, f"split {span.file} of the data set", _SET_COLUMN)
    for start in range(span.start, span.stop, _ROWS):
        values = data[start : min(start + _ROWS, span.stop)]
        for row in zip(*(values[column] for column in columns), strict=True):
            yield dict(zip(columns, row, strict=True))
