"""From text to a folder of tokens, in shards. After an interruption, complete shards are kept."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from tost._io import atomic_path, read_json, sha256_of, write_atomic, write_json
from tost.data.prepare import Report
from tost.data.text.corpora import CorpusOptions, TextJob
from tost.data.text.read import Source, documents_of, find_sources, lines_of
from tost.data.text.tokenizers import (
    TOKENIZER_FILE,
    CharTokenizer,
    DataTokenizer,
    cut_text,
    end_of_text_id,
    load_tokenizer,
)
from tost.data.tokens.options import (
    INDEX,
    MAX_INDEX_BYTES,
    FileRecord,
    Index,
    ShardRecord,
    SplitRecord,
    TokenizerRecord,
    read_index,
)
from tost.errors import ConfigError, StorageError

_CHUNK = 1 << 18  # characters that are encoded at once
_BATCH = 1 << 21  # characters that are gathered before they are encoded together
_COUNTS = ("tokens", "documents", "bytes", "source_bytes", "source_words")


class Part(NamedTuple):
    """The documents of one split of the result.

    Attributes:
        split: Its name.
        sources: Where they are read.
        documents: Number of documents.
        chosen: Which documents of the sources belong to it, bool; None for all.
        characters: First and last character of the only document that belong to it; None for all.
    """

    split: str
    sources: list[Source]
    documents: int
    chosen: Any = None
    characters: tuple[int, int] | None = None

    def read(self, job: TextJob) -> Iterator[Iterable[str]]:
        """Return the documents."""
        documents = documents_of(self.sources, job)
        if self.characters is not None:
            return iter([_characters(next(documents), *self.characters)])
        return documents if self.chosen is None else compress(documents, self.chosen)


def prepare_text(options: CorpusOptions, out: Path, *, workers: int, report: Report) -> dict[str, object]:
    """Turn a corpus into a folder of tokens; see `tost.data.prepare.prepare`.

    Args:
        options: The corpus, and how it is read.
        out: Folder to write to.
        workers: Unused: the tokenizers library takes as many threads as RAYON_NUM_THREADS says.
        report: Progress callback.

    Returns:
        Facts about the folder.

    Raises:
        ConfigError: The source, the tokenizer or an option cannot be used.
    """
    work = out / "work"
    if (out / INDEX).is_file():
        shutil.rmtree(work, ignore_errors=True)
        return {**_facts(read_index(out)), "already there": True}
    job = options.job()
    # Mistakes in the options are found before anything is written.
    loaded = None if job.tokenizer == "chars" else load_tokenizer(job.tokenizer)
    if loaded is not None:
        end_of_text_id(loaded, job.end_of_text)
    splits = find_sources(job)
    try:
        counts, alphabet = _survey(job, splits, work, "chars" if loaded is None else loaded.fingerprint, report)
        separate = job.end_of_text == "auto" and not job.newlines and sum(counts.values()) > 1
        tokenizer = loaded or CharTokenizer("".join(sorted({*alphabet, "\n"} if separate else alphabet)))
        end_of_text = end_of_text_id(tokenizer, job.end_of_text, separate=separate)
        parts, rule = _parts(job, splits, counts)
        tokenizer.save(out)
        end = np.array([] if end_of_text is None else [end_of_text], dtype=np.int64)
        done, total = 0, sum(part.documents for part in parts)

        def tick(count: int) -> None:
            nonlocal done
            done += count
            report(done, total, "tokenizing")

        tick(0)
        records = {part.split: _SplitWriter(part, job, tokenizer, end, out, tick).write() for part in parts}
    except ConfigError:
        # If no shard is complete, a mistake in the options can be corrected in the same folder.
        if not any(work.glob("*.shards.json")):
            shutil.rmtree(work, ignore_errors=True)
            (out / TOKENIZER_FILE).unlink(missing_ok=True)
        raise
    described, path = tokenizer.record() | {"name": tokenizer.name}, out / TOKENIZER_FILE
    if "file" in described:
        described["file"] = FileRecord(file=path.name, size=path.stat().st_size, sha256=sha256_of(path))
    files = {name: [shard.model_dump() for shard in split.shards] for name, split in records.items()}
    settings = options.model_dump(mode="json")
    settings["source"] = Path(job.source).name if job.source else job.hub
    index = Index(
        format="tost-tokens",
        version=1,
        name=job.name,
        fingerprint=hashlib.sha256(json.dumps([tokenizer.fingerprint, files], sort_keys=True).encode()).hexdigest(),
        dtype=cast(Any, token_dtype(tokenizer.vocab_size).name),
        tokenizer=TokenizerRecord(
            **described,
            vocab_size=tokenizer.vocab_size,
            fingerprint=tokenizer.fingerprint,
            end_of_text=end_of_text,
        ),
        splits=records,
        source=[_source_facts(source, split, job) for split in splits for source in splits[split]],
        settings={**settings, "split": rule},
    )
    write_atomic(out / INDEX, json.dumps(index.model_dump(mode="json"), indent=1) + "\n")
    shutil.rmtree(work)
    return _facts(index)


def _facts(index: Index) -> dict[str, object]:
    return {
        "name": index.name,
        "tokenizer": index.tokenizer.name,
        "vocab_size": index.tokenizer.vocab_size,
        "dtype": index.dtype,
        **{f"{split} tokens": record.tokens for split, record in index.splits.items()},
        **{f"{split} documents": record.documents for split, record in index.splits.items()},
        "fingerprint": index.fingerprint[:12],
    }


def _source_facts(source: Source, split: str, job: TextJob) -> dict[str, Any]:
    root, path = Path(str(job.source)), source.path
    if source.table is not None:
        return {"hub": job.hub or root.name, "split": split, "rows": len(source.table)}
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) and path != root else path.name
    return {"file": name, "split": split, "size": path.stat().st_size}


def _survey(
    job: TextJob, splits: dict[str, list[Source]], work: Path, tokenizer: str, report: Report
) -> tuple[dict[str, int], str]:
    """Return the number of documents of every split, and all characters if they are the tokenizer.

    Both are kept for the case of an interruption; the sources and the tokenizer must be the same then.
    """
    path, again = work / "plan.json", f"remove {work.parent} and run the command again."
    sources = [(split, source) for split in splits for source in splits[split]]
    now = {"tokenizer": tokenizer, "sources": [[split, *_state(source)] for split, source in sources]}
    if path.is_file():
        before = read_json(path, error=StorageError, max_bytes=MAX_INDEX_BYTES, hint=again)
        if not isinstance(before, dict) or any(before.get(key) != now[key] for key in now):
            raise ConfigError(
                f"the source, the tokenizer or the version of tost is not what it was when {work.parent} was begun; "
                f"{again}"
            )
        return before["documents"], before["characters"]
    counts, alphabet = dict.fromkeys(splits, 0), set[str]()
    for number, (split, source) in enumerate(sources):
        report(number, len(sources), f"reading {source.path.name}")
        if source.table is not None and tokenizer != "chars":
            counts[split] += len(source.table)
            continue
        for document in documents_of([source], job):
            counts[split] += 1
            if tokenizer == "chars":
                alphabet.update(*document)
    if job.joined:
        counts = dict.fromkeys(splits, 1)
    if not sum(counts.values()):
        raise ConfigError(f"{job.title} holds no documents; there is nothing to prepare.")
    if tokenizer == "chars" and not alphabet:
        raise ConfigError("the documents hold no characters at all; there is nothing to learn.")
    characters = "".join(sorted(alphabet))
    write_json(path, {**now, "documents": counts, "characters": characters})
    return counts, characters


def _state(source: Source) -> list[Any]:
    if source.table is not None:
        return [str(source.path), len(source.table), source.table._fingerprint]
    status = source.path.stat()
    return [str(source.path), status.st_size, status.st_mtime_ns]


def _parts(job: TextJob, splits: dict[str, list[Source]], counts: dict[str, int]) -> tuple[list[Part], dict[str, Any]]:
    """Return the parts, and how the validation set was made; it is cut off if the source has none."""
    whole, *others = (Part(split, sources, counts[split]) for split, sources in splits.items())
    if job.split == "named" or "validation" in splits or job.validation == 0.0:
        return [whole, *others], {"rule": "named", "splits": sorted(splits)}
    count, rule = whole.documents, {"rule": "tail", "validation": job.validation}
    if count == 1 and job.split != "random":
        # Where bytes are not text, one of them counts as a character.
        length = sum(len(block) for block in next(whole.read(job)))
        place = int(length * (1 - job.validation))
        if not 0 < place < length:
            raise ConfigError(f"{job.title} has {length} characters, too few to cut off a validation set.")
        train = whole._replace(characters=(0, place))
        validation = whole._replace(split="validation", characters=(place, length))
        return [train, validation, *others], {**rule, "of": "characters"}
    held_out = math.ceil(job.validation * count)
    if held_out >= count:
        raise ConfigError(
            f"validation={job.validation} of {count} document(s) leaves none for training; give more documents, a "
            "smaller share, split=tail for a single text, or validation_source."
        )
    chosen = np.zeros(count, dtype=bool)
    if job.split == "tail":
        chosen[-held_out:] = True
    else:
        # As `datasets` draws it in `train_test_split`, so that a known seed gives the known documents.
        chosen[np.random.default_rng(job.seed).permutation(count)[:held_out]] = True
        rule = {"rule": "random", "validation": job.validation, "seed": job.seed}
    train = whole._replace(documents=count - held_out, chosen=~chosen)
    return [train, Part("validation", whole.sources, held_out, chosen), *others], rule


def _characters(blocks: Iterable[str], start: int, stop: int) -> Iterator[str]:
    """Return the characters from `start` to before `stop` of a text."""
    place = 0
    for block in blocks:
        yield block[max(0, start - place) : stop - place]
        place += len(block)
        if place >= stop:
            return


@dataclass
class _SplitWriter:
    """Writes the shards of a split. The record of the complete ones is kept for the case of an interruption.

    Attributes:
        part: The documents.
        job: How they are read.
        tokenizer: Tokenizer.
        end: Id that follows every document, int64 ``[1]``, or ``[0]`` for none.
        out: Folder.
        tick: Called with the number of documents done.
    """

    part: Part
    job: TextJob
    tokenizer: DataTokenizer
    end: NDArray[np.int64]
    out: Path
    tick: Callable[[int], None]
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    shards: list[ShardRecord] = field(default_factory=list)

    def write(self) -> SplitRecord:
        """Write the missing shards, and return the record of the split."""
        path = self.out / "work" / f"{self.part.split}.shards.json"
        # Complete shards are taken over, unless a machine that lost power lost a part of them.
        with suppress(OSError, ValidationError):
            record = SplitRecord.model_validate_json(path.read_bytes())
            if all((self.out / file.file).stat().st_size == file.size for file in record.files):
                self.counts = {key: getattr(record, key) for key in _COUNTS}
                self.shards = list(record.shards)
        documents = self.part.read(self.job)
        self.tick(sum(1 for _ in islice(documents, self.counts["documents"])))
        try:
            for first in documents:
                self._write_shard(self._chunks(chain([first], documents)))
                write_json(path, self._record().model_dump())
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{self.job.title} holds {error.object[error.start]!r}, half of a character, which JSON can state but "
                "no text can hold; remove it."
            ) from error
        if self.counts["documents"] != self.part.documents:
            raise StorageError(
                f"{self.job.title} has changed while it was read; remove {self.out} and run the command again."
            )
        if not self.counts["bytes"]:
            raise ConfigError(
                f"split {self.part.split!r} of {self.job.title} has no text at all; there is nothing to learn."
            )
        return self._record()

    def _record(self) -> SplitRecord:
        return SplitRecord.model_validate({**self.counts, "shards": self.shards})

    def _write_shard(self, chunks: Iterator[tuple[str, bool]]) -> None:
        path = self.out / f"{self.part.split}-{len(self.shards):05d}.bin"
        dtype, digest, lengths, length = token_dtype(self.tokenizer.vocab_size), hashlib.sha256(), list[int](), 0
        with atomic_path(path) as draft, draft.open("wb") as file:
            while batch := list(_batch(chunks)):
                encoded = self.tokenizer.encode_batch([text for text, _ in batch])
                for (text, is_last), ids in zip(batch, encoded, strict=True):
                    self.counts["bytes"] += _size(text)
                    stored = np.concatenate([ids, self.end] if is_last else [ids]).astype(dtype).tobytes()
                    file.write(stored)
                    digest.update(stored)
                    length += len(stored) // dtype.itemsize
                    if is_last:
                        lengths.append(length)
                        length = 0
                self.tick(sum(is_last for _, is_last in batch))
        tokens, ends, beside = sum(lengths), np.array(lengths, dtype="<u8").tobytes(), path.with_suffix(".lengths")
        write_atomic(beside, ends)
        data = FileRecord(file=path.name, size=tokens * dtype.itemsize, sha256=digest.hexdigest())
        offsets = FileRecord(file=beside.name, size=len(ends), sha256=hashlib.sha256(ends).hexdigest())
        self.shards.append(ShardRecord(tokens=tokens, documents=len(lengths), data=data, lengths=offsets))
        self.counts["tokens"] += tokens
        self.counts["documents"] += len(lengths)

    def _chunks(self, documents: Iterable[Iterable[str]]) -> Iterator[tuple[str, bool]]:
        """Return texts that can be encoded alone, each with whether it is the last one of its document.

        They end with the document that completes the shard.
        """
        limit = self.counts["source_bytes"] + self.job.shard_bytes
        for document in documents:
            blocks = self._counted(document)
            edited = map(self.job.edit, lines_of(blocks)) if self.job.edit else blocks
            chunks = cut_text(edited, self.tokenizer, _CHUNK)
            text = next(chunks, "")
            for following in chunks:
                yield text, False
                text = following
            yield text, True
            if self.counts["source_bytes"] >= limit:
                return

    def _counted(self, blocks: Iterable[str]) -> Iterator[str]:
        """Count the bytes and words of a text on the way."""
        is_inside = False  # of a word that began in the block before
        for block in filter(None, blocks):
            self.counts["source_bytes"] += _size(block)
            self.counts["source_words"] += len(block.split()) - (is_inside and not block[0].isspace())
            is_inside = not block[-1].isspace()
            yield block


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type that holds ids below `vocab_size`: uint8, uint16 or uint32, little-endian."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def _size(text: str) -> int:
    return len(text.encode("utf-8", errors="surrogateescape"))


def _batch(chunks: Iterator[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Return the next chunks that are encoded together."""
    size = 0
    for chunk in chunks:
        yield chunk
        size += len(chunk[0]) + 1
        if size >= _BATCH:
            return
