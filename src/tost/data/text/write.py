"""One piece of a corpus becomes shards of tokens: the part of preparing that runs in many processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tost.data.text.cbt import COLUMNS, expand, parse_questions
from tost.data.text.detokenize import EDITS
from tost.data.text.files import Span, read_rows
from tost.data.text.options import TextJob
from tost.data.text.tokenizers import DataTokenizer
from tost.data.text.vocabulary import cut_text, token_dtype
from tost.data.tokens.format import ShardRecord
from tost.data.tokens.writer import ShardWriter
from tost.errors import ConfigError

__all__ = ["Cut", "Piece", "PieceWriter", "Tally", "documents_of", "texts_of"]

_CHUNK = 1 << 18  # characters that are encoded at once
_BATCH = 1 << 21  # characters that are gathered before they are encoded together


class Piece(NamedTuple):
    """A part of a split that one process turns into one shard.

    Attributes:
        number: Its place in the split.
        split: The split.
        spans: What it is read from, in order.
        first: Number of its first document in the split.
    """

    number: int
    split: str
    spans: tuple[Span, ...]
    first: int

    @property
    def rows(self) -> int:
        """Documents in it."""
        return sum(span.rows for span in self.spans)

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.split}-{self.number:05d}"


class Cut(NamedTuple):
    """What of a piece goes to the validation set instead.

    Attributes:
        documents: Numbers of documents in the split, sorted, int64.
        after: If not None, every character of the only document from this one on.
    """

    documents: NDArray[np.int64]
    after: int | None = None


@dataclass
class Tally:
    """What was written of a piece to one split."""

    bytes: int = 0
    source_bytes: int = 0
    source_words: int = 0
    answers: list[int] = field(default_factory=list)
    shard: ShardRecord | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**vars(self), "shard": None if self.shard is None else self.shard.model_dump()}


class PieceWriter:
    """Turns pieces into shards.

    Args:
        job: What is to be done.
        tokenizer: Turns text into ids.
        end_of_text: Id that follows every document; None for none.
        out: Folder for the shards.
        held_out: Folder for what goes to the validation set.
        hub: Data sets of the hub by split.
    """

    def __init__(
        self,
        job: TextJob,
        tokenizer: DataTokenizer,
        end_of_text: int | None,
        *,
        out: Path,
        held_out: Path,
        hub: Mapping[str, Any],
    ) -> None:
        self.job, self.tokenizer, self.hub = job, tokenizer, hub
        self._folders = {False: out, True: held_out}
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.array([] if end_of_text is None else [end_of_text], dtype=np.int64)

    def write(self, piece: Piece, cut: Cut, tick: Callable[[int], None]) -> dict[str, dict[str, Any]]:
        """Write the shards of a piece.

        Args:
            piece: Which.
            cut: What of it goes to the validation set.
            tick: Called with a number of documents that are done; may raise to stop.

        Returns:
            A `Tally` as plain values for ``"kept"`` and for ``"held_out"``, if there is anything of it.
        """
        tallies: dict[bool, Tally] = {}
        with ExitStack() as stack:
            shards: dict[bool, ShardWriter] = {}

            def shard(held_out: bool) -> ShardWriter:
                if held_out not in shards:
                    shards[held_out] = ShardWriter(self._folders[held_out] / f"{piece.name}.bin", self._dtype)
                    stack.callback(shards[held_out].abandon)
                    tallies[held_out] = Tally()
                return shards[held_out]

            for batch in _batches(self._chunks(piece, cut)):
                encoded = self.tokenizer.encode_batch([chunk.text for chunk in batch])
                for chunk, ids in zip(batch, encoded, strict=True):
                    sink = shard(chunk.held_out)
                    sink.add(ids)
                    self._count(tallies[chunk.held_out], chunk)
                    if chunk.ends:
                        sink.add(self._end)
                        sink.end_document()
                tick(sum(chunk.ends for chunk in batch))
            for held_out, written in shards.items():
                tallies[held_out].shard = written.finish()
            stack.pop_all()
        return {"held_out" if held_out else "kept": tally.as_json() for held_out, tally in tallies.items()}

    def _count(self, tally: Tally, chunk: _Chunk) -> None:
        tally.bytes += len(chunk.text.encode("utf-8", errors="surrogateescape"))
        tally.source_bytes += chunk.source_bytes
        tally.source_words += chunk.source_words
        if chunk.answer is not None:
            tally.answers.append(chunk.answer)

    def _chunks(self, piece: Piece, cut: Cut) -> Iterator[_Chunk]:
        """Return the text of every document in pieces that can be encoded by themselves."""
        held_out = set(cut.documents.tolist())
        for number, document in enumerate(documents_of(piece, self.job, self.tokenizer, self.hub), start=piece.first):
            if cut.after is None:
                yield from self._document(document, number in held_out)
            else:
                yield from self._document(document._replace(blocks=_before(document.blocks, cut.after)), False)
                again = next(documents_of(piece, self.job, self.tokenizer, self.hub))
                yield from self._document(again._replace(blocks=_after(again.blocks, cut.after)), True)

    def _document(self, document: _Document, held_out: bool) -> Iterator[_Chunk]:
        meter = _Meter(document.blocks)
        chunks = cut_text(_edited(meter, self.job.edit), self.tokenizer, _CHUNK)
        text, answer = next(chunks, ""), document.answer
        for following in chunks:
            yield _Chunk(text, held_out, False, *meter.take(), answer)
            text, answer = following, None
        yield _Chunk(text, held_out, True, *meter.take(), answer)


class _Document(NamedTuple):
    blocks: Iterable[str]
    answer: int | None = None


class _Chunk(NamedTuple):
    text: str
    held_out: bool
    ends: bool
    source_bytes: int
    source_words: int
    answer: int | None


class _Meter:
    """Passes blocks of a text on and counts their bytes and words."""

    def __init__(self, blocks: Iterable[str]) -> None:
        self._blocks, self._bytes, self._words, self._inside = blocks, 0, 0, False

    def __iter__(self) -> Iterator[str]:
        for block in self._blocks:
            if block:
                self._bytes += len(block.encode("utf-8", errors="surrogateescape"))
                # A word that began in the last block is counted already.
                self._words += len(block.split()) - (self._inside and not block[0].isspace())
                self._inside = not block[-1].isspace()
            yield block

    def take(self) -> tuple[int, int]:
        """Return what was counted since the last call."""
        counted = self._bytes, self._words
        self._bytes = self._words = 0
        return counted


def documents_of(
    piece: Piece, job: TextJob, tokenizer: DataTokenizer | None, hub: Mapping[str, Any]
) -> Iterator[_Document]:
    """Return the documents of a piece as they are in the source.

    Args:
        piece: Which.
        job: How they are read.
        tokenizer: Bytes that are not UTF-8 are an error unless it encodes bytes.
        hub: Data sets of the hub by split.
    """
    errors = "surrogateescape" if tokenizer is not None and tokenizer.name == "bytes" else "strict"
    columns = COLUMNS if job.choices else (job.column,)
    if job.joined:
        yield _Document(_joined(piece, job, hub, errors))
        return
    for span in piece.spans:
        rows = read_rows(span, columns, hub, errors)
        if job.choices and span.kind == "text":
            rows = parse_questions(next(rows)[columns[0]], span.file)
        if job.choices:
            for row in rows:
                texts, answer = expand(row)
                for place, text in enumerate(texts):
                    yield _Document((text,), answer if place == 0 else None)
        else:
            for row in rows:
                yield _Document(texts_of(row[job.column], span, job))


def texts_of(value: Any, span: Span, job: TextJob) -> Iterable[str]:
    """Return the text of one row as blocks.

    Raises:
        ConfigError: It is no text.
    """
    if span.kind == "text":
        blocks: Iterable[str] = value
        return blocks
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


def _joined(piece: Piece, job: TextJob, hub: Mapping[str, Any], errors: str) -> Iterator[str]:
    for span in piece.spans:
        for row in read_rows(span, (job.column,), hub, errors):
            if span.kind == "text":
                yield from row[job.column]
            else:
                (text,) = texts_of(row[job.column], span, job)
                yield text if text.endswith("\n") else f"{text}\n"


def _edited(blocks: Iterable[str], edit: str) -> Iterator[str]:
    if not edit:
        yield from blocks
        return
    change, held = EDITS[edit], ""
    for block in blocks:
        *lines, held = (held + block).split("\n")
        for line in lines:
            yield change(f"{line}\n")
    if held:
        yield change(held)


def _before(blocks: Iterable[str], count: int) -> Iterator[str]:
    for block in blocks:
        yield block[:count]
        count -= len(block)
        if count <= 0:
            return


def _after(blocks: Iterable[str], count: int) -> Iterator[str]:
    for block in blocks:
        yield block[max(0, count) :]
        count -= len(block)


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
