"""Turning pieces of a corpus into shards of tokens: the part of the preparation that many processes share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tost.data._pool import Tick
from tost.data.text.cbt import CHOICES, COLUMNS, candidate_texts, parse_questions
from tost.data.text.corpora import TextJob
from tost.data.text.detokenize import EDITS
from tost.data.text.files import Hub, Span, lines_of, read_rows
from tost.data.text.tokenizers import DataTokenizer, cut_text
from tost.data.tokens.format import SplitRecord
from tost.data.tokens.writer import ShardWriter, token_dtype, write_shard
from tost.errors import ConfigError

KEPT, HELD_OUT = "kept", "held_out"
"""The two outputs of a piece: documents that stay in its split, and those that go to the validation set."""

_CHUNK = 1 << 18  # characters that are encoded at once
_BATCH = 1 << 21  # characters that are gathered before they are encoded together


class Piece(NamedTuple):
    """A part of a split that one process turns into one shard.

    Attributes:
        number: Its number in the split.
        split: The split.
        spans: Parts of the source, in order.
        first: Number of its first document in the split.
    """

    number: int
    split: str
    spans: tuple[Span, ...]
    first: int

    @property
    def rows(self) -> int:
        """Number of documents."""
        return sum(span.rows for span in self.spans)

    @property
    def name(self) -> str:
        """Name of its files, without ending."""
        return f"{self.split}-{self.number:05d}"


class Cut(NamedTuple):
    """The part of a piece that goes to the validation set.

    Attributes:
        documents: Numbers of documents in the split, sorted, int64.
        after: If not None, every character of the only document from this one on.
    """

    documents: NDArray[np.int64]
    after: int | None = None


class Document(NamedTuple):
    """A document as it is in the source.

    Attributes:
        blocks: Its text, in order.
        answer: For the first of several candidates for an answer, which of them is right.
    """

    blocks: Iterable[str]
    answer: int | None = None


def write_piece(
    piece: Piece,
    cut: Cut,
    job: TextJob,
    hub: Hub,
    *,
    tokenizer: DataTokenizer,
    end_of_text: int | None,
    folders: Mapping[str, Path],
    tick: Tick,
) -> dict[str, SplitRecord]:
    """Write the shards of a piece.

    Args:
        piece: The piece.
        cut: The part of it that goes to the validation set.
        job: How the corpus is read.
        hub: Data sets of the hub by split.
        tokenizer: Turns text into ids.
        end_of_text: Id that follows every document; None for none.
        folders: Folder of each output.
        tick: Called with the number of documents done.

    Returns:
        Records of the outputs that got any document, with one shard each.
    """
    outputs: dict[str, _Output] = {}
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([] if end_of_text is None else [end_of_text], dtype=np.int64)
    with ExitStack() as stack, _refusing_surrogates(job):
        for batch in _batches(_chunks(piece, cut, job, hub, tokenizer)):
            encoded = tokenizer.encode_batch([chunk.text for chunk in batch])
            for chunk, ids in zip(batch, encoded, strict=True):
                if chunk.output not in outputs:
                    shard = write_shard(folders[chunk.output] / f"{piece.name}.bin", dtype)
                    outputs[chunk.output] = _Output(stack.enter_context(shard))
                outputs[chunk.output].add(chunk, ids, end)
            tick(sum(chunk.ends for chunk in batch))
    return {name: output.record(CHOICES if job.choices else 0) for name, output in outputs.items()}


@contextmanager
def _refusing_surrogates(job: TextJob) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{job.title} holds {error.object[error.start]!r}, half of a character, which JSON can state but no text "
            "can hold; remove it."
        ) from error


class _Chunk(NamedTuple):
    """Text that can be encoded by itself."""

    text: str
    output: str
    ends: bool  # whether it is the last of its document
    source_bytes: int
    source_words: int
    answer: int | None


@dataclass
class _Output:
    shard: ShardWriter
    bytes: int = 0
    source_bytes: int = 0
    source_words: int = 0
    answers: list[int] = field(default_factory=list)

    def add(self, chunk: _Chunk, ids: NDArray[Any], end: NDArray[np.int64]) -> None:
        self.shard.add(ids)
        self.bytes += _size(chunk.text)
        self.source_bytes += chunk.source_bytes
        self.source_words += chunk.source_words
        if chunk.answer is not None:
            self.answers.append(chunk.answer)
        if chunk.ends:
            self.shard.add(end)
            self.shard.end_document()

    def record(self, choices: int) -> SplitRecord:
        shard = self.shard.record
        sizes = {"bytes": self.bytes, "source_bytes": self.source_bytes, "source_words": self.source_words}
        counts = {"tokens": shard.tokens, "documents": shard.documents, "choices": choices, **sizes}
        return SplitRecord(shards=[shard], answers=self.answers, **counts)


def _size(text: str) -> int:
    return len(text.encode("utf-8", errors="surrogateescape"))


def _batches(chunks: Iterable[_Chunk]) -> Iterator[list[_Chunk]]:
    batch: list[_Chunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text) + 1
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _chunks(piece: Piece, cut: Cut, job: TextJob, hub: Hub, tokenizer: DataTokenizer) -> Iterator[_Chunk]:
    held_out = set(cut.documents.tolist())
    for number, document in enumerate(documents_of(piece, job, hub), start=piece.first):
        if cut.after is None:
            yield from _encodable(document, HELD_OUT if number in held_out else KEPT, job, tokenizer)
            continue
        again = next(documents_of(piece, job, hub))
        before, after = _characters(document.blocks, 0, cut.after), _characters(again.blocks, cut.after, None)
        for output, blocks in ((KEPT, before), (HELD_OUT, after)):
            yield from _encodable(Document(blocks, document.answer), output, job, tokenizer)


def _characters(blocks: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    """Return the characters from `start` to before `stop` of a text."""
    place = 0
    for block in blocks:
        yield block[max(0, start - place) : None if stop is None else stop - place]
        place += len(block)
        if stop is not None and place >= stop:
            return


def _encodable(document: Document, output: str, job: TextJob, tokenizer: DataTokenizer) -> Iterator[_Chunk]:
    meter = _Meter(document.blocks)
    edited = map(EDITS[job.edit], lines_of(meter)) if job.edit else meter
    chunks = cut_text(edited, tokenizer, _CHUNK)
    text, answer = next(chunks, ""), document.answer
    for following in chunks:
        yield _Chunk(text, output, False, *meter.take(), answer)
        text, answer = following, None
    yield _Chunk(text, output, True, *meter.take(), answer)


class _Meter:
    """Passes blocks of a text on and counts their bytes and words."""

    def __init__(self, blocks: Iterable[str]) -> None:
        self._blocks, self._bytes, self._words, self._inside = blocks, 0, 0, False

    def __iter__(self) -> Iterator[str]:
        for block in self._blocks:
            if block:
                self._bytes += _size(block)
                # A word that began in the last block is counted already.
                self._words += len(block.split()) - (self._inside and not block[0].isspace())
                self._inside = not block[-1].isspace()
            yield block

    def take(self) -> tuple[int, int]:
        """Return the counts since the last call."""
        counted = self._bytes, self._words
        self._bytes = self._words = 0
        return counted


def documents_of(piece: Piece, job: TextJob, hub: Hub) -> Iterator[Document]:
    """Return the documents of a piece as they are in the source.

    Args:
        piece: The piece.
        job: How the corpus is read.
        hub: Data sets of the hub by split.

    Raises:
        ConfigError: A row holds no text.
    """
    if job.joined:
        yield Document(_joined(piece, job, hub))
        return
    columns = COLUMNS if job.choices else (job.column,)
    for span in piece.spans:
        rows = read_rows(span, columns, hub, job.errors)
        if not job.choices:
            for row in rows:
                yield Document(_blocks(row[job.column], span, job))
            continue
        for row in parse_questions(next(rows)[columns[0]], span.file) if span.kind == "text" else rows:
            (first, *others), answer = candidate_texts(row)
            yield Document((first,), answer)
            for text in others:
                yield Document((text,))


def _joined(piece: Piece, job: TextJob, hub: Hub) -> Iterator[str]:
    for span in piece.spans:
        for row in read_rows(span, (job.column,), hub, job.errors):
            if span.kind == "text":
                yield from row[job.column]
            else:
                (text,) = _blocks(row[job.column], span, job)
                yield text if text.endswith("\n") else f"{text}\n"


def _blocks(value: Any, span: Span, job: TextJob) -> Iterable[str]:
    """Return the text of one row."""
    if span.kind == "text":
        return value
    if not isinstance(value, str):
        raise ConfigError(
            f"{span.file}: {job.column!r} holds {'nothing' if value is None else type(value).__name__} where a text is "
            "needed; choose another column, or leave such rows out."
        )
    if span.kind == "lines":
        if job.newlines:
            return (value if value.strip() else "",)
        return (value.removesuffix("\n").removesuffix("\r"),)
    return (value,)
