"""Documents of text in files, tables and data sets of the Hugging Face hub, read in bounded memory."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tost._io import read_pieces
from tost._text import did_you_mean
from tost.data._tables import check_columns, load_hub, open_parquet
from tost.data._tar import open_tar
from tost.data.text.corpora import TextJob
from tost.errors import ConfigError

Row = Mapping[str, Any]
Columns = tuple[str, ...]

CHOICES = 10
"""Candidates of a question of the Children's Book Test."""

_QUESTION = ("sentences", "question", "answer", "options")
_BLANK = "XXXXX"
_ENDINGS = {
    **dict.fromkeys((".txt", ".text", ".raw", ".tokens"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{f".{format}": format for format in ("json", "csv", "tsv", "parquet", "tar")},
}
_PACKED = (".gz", ".xz", ".zst")
_KNOWN = f"files are known by their endings: {', '.join(_ENDINGS)}; text, json and csv also with {', '.join(_PACKED)}"
_SPLIT = re.compile(r"(?:^|[._-])(train|training|valid|validation|val|dev|development|test)(?=[._-]|$)")
_SPLITS = {"train": "train", "training": "train", "test": "test"}
_SET_COLUMN = " Set column."
_BLOCK = 1 << 20
_ROWS = 512
_LONGEST = 1 << 28  # bytes of a line, of a document in a tar file, or of a file that is read at once


class Source(NamedTuple):
    """A file, or a split of a data set.

    Attributes:
        path: Path of the file, or name of the split.
        format: ``text``, ``lines``, ``jsonl``, ``json``, ``csv``, ``tsv``, ``parquet``, ``tar`` or ``table``.
        table: The split as a table of `datasets`; None for files.
    """

    path: Path
    format: str
    table: Any = None


class Document(NamedTuple):
    """A document.

    Attributes:
        blocks: Its text, in order.
        answer: For the first of several candidates for an answer, the number of the right one.
    """

    blocks: Iterable[str]
    answer: int | None = None


def find_sources(job: TextJob) -> dict[str, list[Source]]:
    """Return the sources of every split of a corpus, in order.

    Raises:
        ConfigError: There is none, or its format is not known.
    """
    groups: dict[str, list[Source]] = {}
    tables = _load_tables(job)
    for name, table in tables.items():
        groups.setdefault(_split_of([name]) or "train", []).append(Source(Path(name), "table", table))
    if not tables:
        root = Path(str(job.source))
        for source in _find_files(job, root):
            groups.setdefault(_split_of(source.path.relative_to(root).parts or [root.name]), []).append(source)
    everything = sorted((source for group in groups.values() for source in group), key=lambda source: source.path)
    named: dict[str, list[Source]] = {
        split: groups[split] for split in ("train", "validation", "test") if split in groups
    }
    if job.sources:
        return {"train": everything} | {split: _find_files(job, Path(path)) for split, path in job.sources.items()}
    if job.split in ("random", "tail"):
        # The training split of a data set is the corpus; files are one corpus whatever their names.
        return {"train": named["train"] if tables and "train" in named else everything}
    if job.split == "auto":
        whole = "" in groups or "train" not in named or (len(named) == 1 and not tables)
        return {"train": everything} if whole else named
    if not named and len(job.splits) == 1:
        return {job.splits[0]: everything}
    wanted = {split: group for split, group in named.items() if not job.splits or split in job.splits}
    if not wanted:
        raise ConfigError(
            f"{job.title} has the splits: {', '.join(sorted(named)) or 'none by its names'}; need "
            f"{' or '.join(job.splits or ('train', 'validation', 'test'))}. Call files or folders by their split, such "
            "as test.txt, or set splits to a single one."
        )
    return wanted


def _split_of(parts: Iterable[str]) -> str:
    """Return the split that the name of a file, or of a folder that it is in, contains; empty for none."""
    for part in reversed(list(parts)):
        if found := _SPLIT.findall(part.lower()):
            return _SPLITS.get(found[-1], "validation")
    return ""


def _load_tables(job: TextJob) -> Mapping[str, Any]:
    """Return the splits of a data set of the hub, or of one that `datasets` saved; none for other files."""
    if job.source is None:
        if job.hub is None:
            raise ConfigError(f"{job.name} is read from files; give --source.")
        remedy = "give --source with a copy on disk."
        splits: Mapping[str, Any] = load_hub(job.hub.name, job.hub.config, revision=job.hub.revision, remedy=remedy)
        return splits
    folder = Path(job.source)
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return {}
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
        return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    except Exception as error:  # a damaged folder makes the library fail in many ways
        raise ConfigError(
            f"{folder} cannot be read as a folder of datasets.save_to_disk, it is empty or damaged: {error}"
        ) from error


def _find_files(job: TextJob, root: Path) -> list[Source]:
    if not root.exists():
        raise ConfigError(
            f"the source {root} does not exist; give a file, a folder, or hub:NAME where that is possible."
        )
    files = [root]
    if root.is_dir():
        below = ((file, file.relative_to(root).parts) for file in root.rglob("*") if file.is_file())
        visible = [entry for entry in below if not any(part.startswith(".") for part in entry[1])]
        files = [file for file, _ in sorted(visible, key=lambda entry: entry[1])]
    auto = job.format == "auto"
    sources = [Source(file, format) for file in files if (format := _format_of(file) if auto else job.format)]
    if auto:  # beside other files, .json describes them
        sources = [source for source in sources if source.format != "json"] or sources
    if not sources:
        ending = "".join(root.suffixes[-2:] if root.suffix.lower() in _PACKED else root.suffixes[-1:])
        problem = f"the ending {ending!r} is not known; {did_you_mean(ending, _ENDINGS)}"
        problem = f"{root}: {problem}" if root.is_file() else f"the source {root} holds no text; "
        raise ConfigError(f"{problem}{_KNOWN}. If it is plain text, add format=text.")
    if job.choices and any(f"_{job.choices}_" in source.path.name for source in sources):
        sources = [source for source in sources if f"_{job.choices}_" in source.path.name]
    if job.documents == "line" and not job.joined:
        sources = [source._replace(format="lines") if source.format == "text" else source for source in sources]
    return sources


def _format_of(path: Path) -> str | None:
    is_packed = path.suffix.lower() in _PACKED
    format = _ENDINGS.get((Path(path.stem) if is_packed else path).suffix.lower())
    return None if is_packed and format in ("parquet", "tar") else format


def documents_of(sources: Iterable[Source], job: TextJob) -> Iterator[Document]:
    """Return the documents of a split. A file is not opened before the blocks of its text are read.

    Raises:
        ConfigError: A source cannot be read, or a row holds no text.
    """
    if job.joined:
        yield Document(_joined(sources, job))
        return
    for source in sources:
        if not job.choices:
            for row in _rows(source, (job.column,), job.errors):
                yield Document(_blocks(row[job.column], source, job))
            continue
        rows = _published_questions(source.path) if source.format == "text" else _rows(source, _QUESTION, job.errors)
        for row in rows:
            (first, *others), answer = _candidates(row)
            yield Document((first,), answer)
            for text in others:
                yield Document((text,))


def _joined(sources: Iterable[Source], job: TextJob) -> Iterator[str]:
    for source in sources:
        for row in _rows(source, (job.column,), job.errors):
            if source.format == "text":
                yield from row[job.column]
            else:
                (text,) = _blocks(row[job.column], source, job)
                yield text if text.endswith("\n") else f"{text}\n"


def _blocks(value: Any, source: Source, job: TextJob) -> Iterable[str]:
    if source.format == "text":
        return value
    if not isinstance(value, str):
        raise ConfigError(
            f"{source.path}: {job.column!r} holds {'nothing' if value is None else type(value).__name__} where a text "
            "is needed; choose another column, or leave such rows out."
        )
    if source.format != "lines":
        return (value,)
    return (value if value.strip() else "",) if job.newlines else (value.removesuffix("\n").removesuffix("\r"),)


def _rows(source: Source, columns: Columns, errors: str) -> Iterator[Row]:
    """Return the rows of a source; the text of a whole file comes as an iterator of blocks."""
    path = source.path
    match source.format:
        case "text":
            yield {columns[0]: _text_blocks(path, errors)}
        case "lines":
            yield from ({columns[0]: line} for line in _lines(path, errors))
        case "csv" | "tsv":
            yield from _csv_rows(path, columns, errors, delimiter="," if source.format == "csv" else "\t")
        case "json" | "jsonl":
            yield from _json_rows(path, columns, errors, by_line=source.format == "jsonl" or _has_lines(path))
        case "tar":
            yield from _tar_rows(path, columns, errors)
        case "parquet":
            with open_parquet(path) as file:
                check_columns(columns, file.schema_arrow.names, path, _SET_COLUMN)
                # A group may store one long text for all of its rows.
                groups = (file.metadata.row_group(group) for group in range(file.metadata.num_row_groups))
                largest = max((group.total_byte_size for group in groups), default=1)
                for batch in file.iter_batches(max(1, min(_ROWS, _LONGEST // max(1, largest))), columns=list(columns)):
                    yield from batch.to_pylist()
        case _:
            check_columns(columns, source.table.column_names, f"split {path} of the data set", _SET_COLUMN)
            for batch in source.table.select_columns(list(columns)).with_format("arrow").iter(_ROWS):
                yield from batch.to_pylist()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        before = error.object[max(0, error.start - 20) : error.start]
        raise ConfigError(
            f"{path}: byte {error.object[error.start]:#04x} after {before!r} is not UTF-8; convert the file, or use "
            "tokenizer=bytes."
        ) from error
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None):  # of the system, not of the content
            raise
        raise ConfigError(f"{path} is damaged or not complete: {error}; get it again.") from error


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file, unpacked if its ending says so."""
    with _reading(path), _unpacked(path) as file:
        if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ConfigError(
                f"{path} begins as UTF-16 does, but text is read as UTF-8; convert it, such as with `iconv -f UTF-16 "
                "-t UTF-8`."
            )
        yield file


def _unpacked(path: Path) -> Any:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case ".zst":
            import pyarrow as pa  # type: ignore[import-untyped]

            return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), _BLOCK)
    return path.open("rb")


def _text_blocks(path: Path, errors: str) -> Iterator[str]:
    with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", errors=errors, newline="") as file:
        while block := file.read(_BLOCK):
            yield block


def _lines(path: Path, errors: str, *, mark: bytes = b"") -> Iterator[str]:
    """Return the lines of a file, without a mark at its beginning."""
    with _open(path) as file:
        if mark and file.peek(len(mark)).startswith(mark):
            file.read(len(mark))
        while line := file.readline(_LONGEST + 1):
            if len(line) > _LONGEST:
                raise ConfigError(f"{path} has a line of more than {_LONGEST:,} bytes; it is damaged, or no text.")
            yield line.decode("utf-8", errors)


def lines_of(blocks: Iterable[str]) -> Iterator[str]:
    """Return the lines of a text that comes in blocks of any size, each with the line feed that ends it."""
    rest = ""
    for block in blocks:
        *complete, rest = (rest + block).split("\n")
        yield from (f"{line}\n" for line in complete)
    if rest:
        yield rest


def _json_rows(path: Path, columns: Columns, errors: str, *, by_line: bool) -> Iterator[Row]:
    """Read an object per line, or a list of objects, or an object that holds one list."""
    if by_line:
        for number, line in enumerate(_lines(path, errors, mark=codecs.BOM_UTF8), 1):
            if not line.isspace():
                place = f"{path}, line {number}"
                yield _picked(_parsed(line, place), columns, place)
        return
    with _open(path) as file:
        data = bytes(read_pieces(file, _LONGEST + 1))
        if len(data) > _LONGEST:
            raise ConfigError(
                f"{path} has more than {_LONGEST:,} bytes; to read it line by line, convert it to .jsonl."
            )
        text = data.decode("utf-8", errors).removeprefix("\ufeff")
    content = _parsed(text, path) if text.strip() else []
    if isinstance(content, dict) and columns[0] not in content:
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else content
    for number, row in enumerate(content if isinstance(content, list) else [content], 1):
        yield _picked(row, columns, f"{path}, entry {number}")


def _has_lines(path: Path) -> bool:
    """Return whether a .json file holds an object per line, as many do."""
    with _open(path) as file:
        first, second = file.readline(_LONGEST), file.readline(_LONGEST)
    try:
        return bool(second.strip()) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(text: str, place: object) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON ({error}); every line must hold one object.") from error


def _picked(row: Any, columns: Columns, place: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f'{place}: holds a {type(row).__name__}, not an object; write it like {{"text": ...}}.')
    check_columns(columns, list(row), place, _SET_COLUMN)
    return row


def _csv_rows(path: Path, columns: Columns, errors: str, *, delimiter: str) -> Iterator[Row]:
    """Read a table whose first line names the columns."""
    csv.field_size_limit(_LONGEST)
    rows = csv.reader(_lines(path, errors, mark=codecs.BOM_UTF8), delimiter=delimiter, strict=True)
    try:
        if (names := next(rows, None)) is None:
            return
        advice = _SET_COLUMN
        if len(names) == 1 and (others := [mark for mark in ",;\t|" if mark in names[0]]):
            advice = f" They seem to be separated by {others[0]!r}; .csv is read with commas, .tsv with tabs."
        check_columns(columns, names, path, advice)
        if len(set(names)) < len(names):
            raise csv.Error("two columns have the same name")
        for row in rows:
            if len(row) != len(names):
                raise csv.Error(f"it has {len(row)} fields, but the first line names {len(names)} columns")
            yield dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {rows.line_num}: not a row of a table ({error}).") from error


def _tar_rows(path: Path, columns: Columns, errors: str) -> Iterator[Row]:
    """Read the samples of a webdataset: files called ``<key>.txt``, or ``<key>.json`` with an object."""
    with _reading(path), open_tar(path) as archive:
        for entry in archive.entries():
            if (format := _ENDINGS.get(entry.path.suffix.lower())) not in ("text", "json"):
                continue
            place = f"{path}, {entry.path}"
            if entry.size > _LONGEST:
                raise ConfigError(f"{place} has {entry.size:,} bytes; texts of more than {_LONGEST:,} are not read.")
            text = archive.content(entry).decode("utf-8", errors)
            yield {columns[0]: text} if format == "text" else _picked(_parsed(text, place), columns, place)


def _published_questions(path: Path) -> Iterator[Row]:
    """Read the Children's Book Test as published.

    Twenty numbered lines, a last one with question, answer and candidates between tabs.
    """
    sentences: list[str] = []
    for number, line in enumerate(_lines(path, "strict"), start=1):
        if not line.strip():
            continue
        first, _, rest = line.rstrip("\n").partition(" ")
        if "\t" not in rest:
            sentences.append(rest)
            continue
        fields = [field for field in rest.split("\t") if field]
        if len(fields) != 3 or not first.isdigit():
            raise ConfigError(f"{path}, line {number}: a question has three fields between tabs, got {len(fields)}.")
        yield {"sentences": sentences, "question": fields[0], "answer": fields[1], "options": fields[2].split("|")}
        sentences = []


def _candidates(row: Row) -> tuple[list[str], int]:
    """Return the passage with each candidate in place of the missing word, and the number of the right one."""
    options, question = list(row["options"]), str(row["question"])
    if len(options) != CHOICES or row["answer"] not in options or _BLANK not in question:
        raise ConfigError(
            f"a question needs {CHOICES} candidates, the answer among them, and {_BLANK} in its text; got "
            f"{len(options)} candidates, answer {row['answer']!r}, text {question[:60]!r}."
        )
    story = " ".join(sentence.strip() for sentence in row["sentences"])
    texts = [f"{story} {question.replace(_BLANK, option).strip()}" for option in options]
    return texts, options.index(row["answer"])
