"""Documents of text in files, tables and data sets of the Hugging Face hub, read in bounded memory."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tost._text import did_you_mean
from tost.data._tables import check_columns, load_hub, open_parquet
from tost.data.text.corpora import TextJob
from tost.errors import ConfigError

_ENDINGS = {
    **dict.fromkeys((".txt", ".text", ".raw", ".tokens"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
}
_KNOWN = (
    f"files are known by their endings: {', '.join(_ENDINGS)}; text and jsonl also with .gz. Load other formats with "
    "`datasets` and give the folder of save_to_disk"
)
_SPLIT = re.compile(r"(?:^|[._-])(train|training|valid|validation|val|dev|development|test)(?=[._-]|$)")
_SPLITS = {"train": "train", "training": "train", "test": "test"}
_SET_COLUMN = " Set column."
_BLOCK = 1 << 20
_ROWS = 512
_LONGEST = 1 << 28  # bytes of a line, or of the texts of a parquet file that are unpacked at once


class Source(NamedTuple):
    """A file, or a split of a data set.

    Attributes:
        path: Path of the file, or name of the split.
        format: ``text``, ``lines``, ``jsonl``, ``parquet`` or ``table``.
        table: The split as a table of `datasets`; None for files.
    """

    path: Path
    format: str
    table: Any = None


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
    sources = [
        Source(file, format) for file in files if (format := _format_of(file) if job.format == "auto" else job.format)
    ]
    if not sources:
        ending = "".join(root.suffixes[-2:] if root.suffix.lower() == ".gz" else root.suffixes[-1:])
        problem = f"the ending {ending!r} is not known; {did_you_mean(ending, _ENDINGS)}"
        problem = f"{root}: {problem}" if root.is_file() else f"the source {root} holds no text; "
        raise ConfigError(f"{problem}{_KNOWN}. If it is plain text, add format=text.")
    if job.documents == "line" and not job.joined:
        sources = [source._replace(format="lines") if source.format == "text" else source for source in sources]
    return sources


def _format_of(path: Path) -> str | None:
    is_packed = path.suffix.lower() == ".gz"
    format = _ENDINGS.get((Path(path.stem) if is_packed else path).suffix.lower())
    return None if is_packed and format == "parquet" else format


def documents_of(sources: Iterable[Source], job: TextJob) -> Iterator[Iterable[str]]:
    """Return the documents of a split, each as its text in blocks. A file is not opened before its blocks are read.

    Raises:
        ConfigError: A source cannot be read, or a row holds no text.
    """
    if job.joined:
        yield _joined(sources, job)
        return
    for source in sources:
        yield from _documents(source, job)


def _joined(sources: Iterable[Source], job: TextJob) -> Iterator[str]:
    for source in sources:
        for blocks in _documents(source, job):
            if source.format == "text":
                yield from blocks
            else:
                yield from (text if text.endswith("\n") else f"{text}\n" for text in blocks)


def _documents(source: Source, job: TextJob) -> Iterator[Iterable[str]]:
    if source.format == "text":
        yield _text_blocks(source.path, job.errors)
    elif source.format == "lines":
        for line in _lines(source.path, job.errors):
            blank = "" if not line.strip() else line
            yield (blank if job.newlines else line.removesuffix("\n").removesuffix("\r"),)
    else:
        for value in _rows(source, job.column, job.errors):
            if not isinstance(value, str):
                kind = "nothing" if value is None else type(value).__name__
                raise ConfigError(
                    f"{source.path}: {job.column!r} holds {kind} where a text is needed; choose another column, or "
                    "leave such rows out."
                )
            yield (value,)


def _rows(source: Source, column: str, errors: str) -> Iterator[Any]:
    """Return a column of jsonl lines, of a parquet file or of a table."""
    path = source.path
    if source.format == "jsonl":
        for number, line in enumerate(_lines(path, errors), 1):
            line = line.removeprefix("\ufeff") if number == 1 else line
            if not line.isspace():
                yield _parsed(line, column, f"{path}, line {number}")
    elif source.format == "parquet":
        with open_parquet(path) as file:
            check_columns([column], file.schema_arrow.names, path, _SET_COLUMN)
            # A group may store one long text for all of its rows.
            groups = (file.metadata.row_group(group) for group in range(file.metadata.num_row_groups))
            largest = max((group.total_byte_size for group in groups), default=1)
            for batch in file.iter_batches(max(1, min(_ROWS, _LONGEST // max(1, largest))), columns=[column]):
                yield from batch.column(0).to_pylist()
    else:
        check_columns([column], source.table.column_names, f"split {path} of the data set", _SET_COLUMN)
        for batch in source.table.select_columns([column]).with_format("arrow").iter(_ROWS):
            yield from batch[column].to_pylist()


def _parsed(line: str, column: str, place: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON ({error}); every line must hold one object.") from error
    if not isinstance(row, dict):
        raise ConfigError(f'{place}: holds a {type(row).__name__}, not an object; write it like {{"text": ...}}.')
    check_columns([column], list(row), place, _SET_COLUMN)
    return row[column]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file of text, unpacked if its ending says so; errors in the ``with`` block are raised as ConfigError."""
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise ConfigError(
                    f"{path} begins as UTF-16 does, but text is read as UTF-8; convert it, such as with `iconv -f "
                    "UTF-16 -t UTF-8`."
                )
            yield file
    except UnicodeDecodeError as error:
        before = error.object[max(0, error.start - 20) : error.start]
        raise ConfigError(
            f"{path}: byte {error.object[error.start]:#04x} after {before!r} is not UTF-8; convert the file, or use "
            "tokenizer=bytes."
        ) from error
    except (EOFError, OSError, zlib.error) as error:
        if getattr(error, "errno", None):  # of the system, not of the content
            raise
        raise ConfigError(f"{path} is damaged or not complete: {error}; get it again.") from error


def _text_blocks(path: Path, errors: str) -> Iterator[str]:
    with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", errors=errors, newline="") as file:
        while block := file.read(_BLOCK):
            yield block


def _lines(path: Path, errors: str) -> Iterator[str]:
    with _open(path) as file:
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
