"""From text to a folder of tokens, in many processes, continued where it was stopped.

Every piece of the corpus becomes files by itself; a file gets its name once it is complete, and the record of a piece
is written after its files. After an interruption, only the pieces without a record are written again.
"""

from __future__ import annotations

import json
import shutil
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import TypeAdapter, ValidationError

from tost._io import read_json, sha256_of, write_json
from tost.data._pool import Tick, WorkerPool
from tost.data.prepare import Report
from tost.data.text.corpora import CorpusOptions, TextJob
from tost.data.text.files import Hub
from tost.data.text.pieces import HELD_OUT, KEPT, Cut, Piece, documents_of, write_piece
from tost.data.text.plan import VALIDATION, Plan, load_hub, make_plan
from tost.data.text.tokenizers import (
    TOKENIZER_FILE,
    CharTokenizer,
    DataTokenizer,
    end_of_text_id,
    load_tokenizer,
    tokenizer_from_record,
)
from tost.data.tokens.format import (
    INDEX,
    MAX_INDEX_BYTES,
    VERSION,
    FileRecord,
    Index,
    SplitRecord,
    TokenizerRecord,
    content_fingerprint,
    read_index,
    write_index,
)
from tost.data.tokens.writer import merge_shards, token_dtype
from tost.errors import ConfigError, StorageError

_WORK = "work"
_PieceRecord = TypeAdapter(dict[str, SplitRecord])


def prepare_text(options: CorpusOptions, out: Path, *, workers: int, report: Report) -> dict[str, object]:
    """Turn a corpus into a folder of tokens; see `tost.data.prepare.prepare`.

    Args:
        options: The corpus, and how it is read.
        out: Folder to write to.
        workers: Processes that share the work.
        report: Receives the progress.

    Returns:
        Facts about the folder.

    Raises:
        ConfigError: The source, the tokenizer or an option cannot be used.
        StorageError: A process died, or the source is not what it was when the preparation began.
    """
    if (out / INDEX).is_file():
        shutil.rmtree(out / _WORK, ignore_errors=True)  # the very last thing that an interruption could leave
        return {**_facts(read_index(out)), "already there": True}
    job = options.job()
    # Whatever can be wrong with the options shows before anything is written.
    given = None if job.tokenizer == "chars" else load_tokenizer(job.tokenizer)
    if given is not None:
        end_of_text_id(given, job.end_of_text)
    hub = load_hub(job)
    plan = make_plan(job, hub, report)
    _check_unchanged(out, plan, "chars" if given is None else given.fingerprint)
    try:
        with WorkerPool(min(workers, len(plan.pieces)), job, hub, out) as pool:
            separate = plan.needs_separator(job)
            tokenizer = given or CharTokenizer(_alphabet(plan, pool, out, report, {"\n"} if separate else set()))
            end_of_text = end_of_text_id(tokenizer, job.end_of_text, separate=separate)
            tokenizer.save(out)
            write = partial(_write_piece, record=json.dumps(tokenizer.record()), end_of_text=end_of_text)
            units = list(zip(plan.pieces, plan.cuts, strict=True))
            for _ in pool.run(write, units, report=report, total=plan.documents, what="tokenizing"):
                pass
    except ConfigError:
        # If no piece is complete, a mistake in the options can be corrected in the same folder.
        if not any((out / _WORK).glob("*-[0-9]*.json")):
            shutil.rmtree(out / _WORK)
            (out / TOKENIZER_FILE).unlink(missing_ok=True)
        raise
    index = _make_index(job, plan, tokenizer, end_of_text, out, options)
    write_index(out, index)
    shutil.rmtree(out / _WORK)
    return _facts(index)


def _facts(index: Index) -> dict[str, object]:
    tokenizer = index.tokenizer
    return {
        "name": index.name,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "dtype": index.dtype,
        **{f"{split} tokens": record.tokens for split, record in index.splits.items()},
        **{f"{split} documents": record.documents for split, record in index.splits.items()},
        "fingerprint": index.fingerprint[:12],
    }


def _check_unchanged(out: Path, plan: Plan, tokenizer: str) -> None:
    """Compare the plan with that of an interrupted call."""
    path = out / _WORK / "plan.json"
    now = json.loads(json.dumps([tokenizer, plan.seen, plan.pieces, plan.split]))
    if not path.is_file():
        write_json(path, now)
        return
    before = read_json(
        path, error=StorageError, max_bytes=MAX_INDEX_BYTES, hint=f"remove {out} and run the command again."
    )
    if before != now:
        what = "the tokenizer" if before[0] != tokenizer else "the source"
        raise ConfigError(f"{what} is not what it was when {out} was begun; remove {out} and run the command again.")


def _alphabet(plan: Plan, pool: WorkerPool, out: Path, report: Report, further: set[str]) -> str:
    """Return every character of the corpus once, and further ones, sorted."""
    path = out / _WORK / "characters.json"
    if not path.is_file():
        found: set[str] = set()
        for _, characters in pool.run(
            _find_characters, plan.pieces, report=report, total=plan.documents, what="reading"
        ):
            found |= characters
        if not found:
            raise ConfigError("the documents hold no characters at all; there is nothing to learn.")
        write_json(path, "".join(sorted(found | further)))
    return str(read_json(path, error=StorageError, hint=f"remove {path} and run the same command again."))


def _find_characters(piece: Piece, job: TextJob, hub: Hub, out: Path, tick: Tick) -> set[str]:
    found: set[str] = set()
    for document in documents_of(piece, job, hub):
        for block in document.blocks:
            found |= set(block)
        tick(1)
    return found


def _write_piece(
    unit: tuple[Piece, Cut], job: TextJob, hub: Hub, out: Path, tick: Tick, *, record: str, end_of_text: int | None
) -> None:
    piece, cut = unit
    if _read_record(piece, out) is not None:
        tick(piece.rows)
        return
    tokenizer, folders = _tokenizer(record, out), _folders(out)
    written = write_piece(
        piece, cut, job, hub, tokenizer=tokenizer, end_of_text=end_of_text, folders=folders, tick=tick
    )
    write_json(_record_path(piece, out), _PieceRecord.dump_python(written))


@lru_cache(maxsize=1)
def _tokenizer(record: str, out: Path) -> DataTokenizer:
    return tokenizer_from_record(json.loads(record), out)


def _folders(out: Path) -> dict[str, Path]:
    return {KEPT: out, HELD_OUT: out / _WORK}


def _record_path(piece: Piece, out: Path) -> Path:
    return out / _WORK / f"{piece.name}.json"


def _read_record(piece: Piece, out: Path) -> dict[str, SplitRecord] | None:
    """Return what was written of a piece; None if it is not complete.

    The sizes of the files are compared, because a machine that loses power may lose the end of the last ones.
    """
    try:
        record = _PieceRecord.validate_json(_record_path(piece, out).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    for output, folder in _folders(out).items():
        for shard in record[output].shards if output in record else ():
            for known in (shard.data, shard.lengths):
                path = folder / known.file
                if not path.is_file() or path.stat().st_size != known.size:
                    return None
    return record


def _make_index(
    job: TextJob, plan: Plan, tokenizer: DataTokenizer, end_of_text: int | None, out: Path, options: CorpusOptions
) -> Index:
    splits = _merge(plan, out, token_dtype(tokenizer.vocab_size))
    empty = [split for split, record in splits.items() if record.bytes == 0]
    if empty:
        raise ConfigError(
            f"split {empty[0]!r} of {job.source or job.name} has no text at all; there is nothing to learn."
        )
    settings = options.model_dump(mode="json")
    settings["source"] = Path(job.source).name if job.source else job.hub
    return Index(
        format="tost-tokens",
        version=VERSION,
        name=job.name,
        fingerprint=content_fingerprint(tokenizer.fingerprint, splits),
        dtype=cast(Literal["uint8", "uint16", "uint32"], token_dtype(tokenizer.vocab_size).name),
        tokenizer=_tokenizer_record(tokenizer, end_of_text, out),
        splits=splits,
        source=plan.facts,
        settings={**settings, "split": plan.split},
    )


def _merge(plan: Plan, out: Path, dtype: Any) -> dict[str, SplitRecord]:
    """Return the record of every split; documents that were held out become one shard."""
    found: dict[str, list[SplitRecord]] = {}
    held_out = False
    for piece in plan.pieces:
        record = _read_record(piece, out)
        assert record is not None, "every piece was written"
        found.setdefault(piece.split, []).extend([record[KEPT]] if KEPT in record else [])
        if HELD_OUT in record:
            found.setdefault(VALIDATION, []).append(record[HELD_OUT])
            held_out = True
    splits = {split: _sum(records) for split, records in found.items()}
    if held_out:  # then the validation set has nothing else
        shard = merge_shards(out / _WORK, splits[VALIDATION].shards, out / f"{VALIDATION}-00000.bin", dtype)
        splits[VALIDATION] = splits[VALIDATION].model_copy(update={"shards": [shard]})
    return splits


def _sum(records: list[SplitRecord]) -> SplitRecord:
    counts = ("tokens", "documents", "bytes", "source_bytes", "source_words")
    return SplitRecord(
        **{key: sum(getattr(record, key) for record in records) for key in counts},
        shards=[shard for record in records for shard in record.shards],
        answers=[answer for record in records for answer in record.answers],
        choices=max((record.choices for record in records), default=0),
    )


def _tokenizer_record(tokenizer: DataTokenizer, end_of_text: int | None, out: Path) -> TokenizerRecord:
    known = tokenizer.record()
    path = out / TOKENIZER_FILE
    file = FileRecord(file=path.name, size=path.stat().st_size, sha256=sha256_of(path)) if "file" in known else None
    return TokenizerRecord(
        kind=known["kind"],
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        end_of_text=end_of_text,
        characters=known.get("characters"),
        file=file,
    )
