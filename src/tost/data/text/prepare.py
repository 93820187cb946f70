"""From text to a folder of tokens, in many processes, continued where it was stopped.

Every piece of the corpus becomes files by itself; a file has its final name only once it is complete, and a note about
a piece is written after its files. So whatever was interrupted is done again, and nothing else.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from tost.data.prepare import Report
from tost.data.text.cbt import CHOICES
from tost.data.text.options import CorpusOptions, TextJob
from tost.data.text.plan import VALIDATION, Plan, load_hub, make_plan
from tost.data.text.tokenizers import TOKENIZER_FILE, CharText, DataTokenizer
from tost.data.text.vocabulary import find_end_of_text, from_record, load_tokenizer, token_dtype
from tost.data.text.write import Cut, Piece, PieceWriter, documents_of
from tost.data.tokens.format import (
    INDEX,
    FileRecord,
    Index,
    ShardRecord,
    SplitRecord,
    TokenizerRecord,
    content_fingerprint,
    read_index,
    write_json,
)
from tost.data.tokens.writer import hash_file, merge_shards
from tost.errors import ConfigError, StorageError

__all__ = ["prepare_text"]

_WORK = "work"
Tick = Callable[[int], None]


def prepare_text(options: CorpusOptions, out: Path, *, workers: int, report: Report) -> dict[str, object]:
    """Turn a corpus into a folder of tokens; see `tost.data.prepare.prepare`.

    Args:
        options: Which corpus, and how.
        out: Folder to write to.
        workers: Processes that share the work.
        report: Told about progress.

    Returns:
        Facts about the folder.

    Raises:
        ConfigError: The source, the tokenizer or an option cannot be used.
        StorageError: A process died, or what was written before does not fit the source any more.
    """
    if (out / INDEX).is_file():
        shutil.rmtree(out / _WORK, ignore_errors=True)  # the very last thing that an interruption could leave
        return {**_facts(read_index(out)), "already there": True}
    job = options.job()
    # Whatever can be wrong with the options shows before anything is written.
    given = None if job.tokenizer == "chars" else load_tokenizer(job.tokenizer)
    if given is not None:
        find_end_of_text(given, job.end_of_text)
    hub = load_hub(job)
    plan = make_plan(job, hub, report)
    work = out / _WORK
    work.mkdir(exist_ok=True)
    _same_as_before(work / "plan.json", plan, "chars" if given is None else given.fingerprint, out)
    try:
        tokenizer, end_of_text = _tokenize(job, plan, hub, given, out, workers, report)
    except ConfigError:
        _clear_if_nothing_is_done(out)
        raise
    index = _index(job, plan, tokenizer, end_of_text, out, options)
    write_json(out / INDEX, index.model_dump(mode="json", exclude_defaults=False))
    shutil.rmtree(work)
    return _facts(index)


def _tokenize(
    job: TextJob,
    plan: Plan,
    hub: Mapping[str, Any],
    given: DataTokenizer | None,
    out: Path,
    workers: int,
    report: Report,
) -> tuple[DataTokenizer, int | None]:
    """Write every shard; return the tokenizer, made from the text if none is given, and what ends documents."""
    with _Crew(min(workers, len(plan.pieces)), job, hub, out) as crew:
        tokenizer = given or CharText(_characters(plan, crew, out / _WORK, report))
        end_of_text = find_end_of_text(tokenizer, job.end_of_text)
        tokenizer.save(out)
        crew.tokenize(plan, tokenizer, end_of_text, report)
    return tokenizer, end_of_text


def _clear_if_nothing_is_done(out: Path) -> None:
    """Remove what was written if no piece is complete, so that a mistake in the options can be mended in place."""
    if not any((out / _WORK).glob("*-[0-9]*.json")):
        shutil.rmtree(out / _WORK)
        (out / TOKENIZER_FILE).unlink(missing_ok=True)


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


def _same_as_before(path: Path, plan: Plan, tokenizer: str, out: Path) -> None:
    now = json.loads(json.dumps([tokenizer, plan.seen, plan.pieces, plan.split]))
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before != now:
            what = "the tokenizer" if before[0] != tokenizer else "the source"
            raise ConfigError(f"{what} is not what it was when {out} was begun; remove {out} and begin again.")
    else:
        write_json(path, now)


def _characters(plan: Plan, crew: _Crew, work: Path, report: Report) -> str:
    path = work / "characters.json"
    if not path.is_file():
        found = crew.characters(plan, report)
        if not found:
            raise ConfigError("the documents hold no characters at all; there is nothing to learn.")
        write_json(path, found)
    return str(json.loads(path.read_text(encoding="utf-8")))


class _StoppedError(Exception):
    """The other processes are asked to end."""


class _Crew:
    """The processes that do the work; with one worker it is this process itself.

    Args:
        workers: How many.
        job: What is to be done.
        hub: Data sets of the hub by split.
        out: Folder to write to.
    """

    def __init__(self, workers: int, job: TextJob, hub: Mapping[str, Any], out: Path) -> None:
        self._job, self._hub, self._out = job, hub, out
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            # Not forked: this process may have threads, of the tokenizers' library among others.
            context = multiprocessing.get_context("spawn")
            self._stop, self._done = context.Event(), context.Value("q", 0)
            settings = (job, hub, str(out), self._stop, self._done)
            self._pool = ProcessPoolExecutor(workers, context, _start_worker, settings)

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._pool is not None:
            if kind is not None:
                self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    def characters(self, plan: Plan, report: Report) -> str:
        """Return every character of the corpus once, sorted."""
        found: set[str] = set()
        for piece, characters in self._run(_find_characters, plan, [()] * len(plan.pieces), "reading", report):
            del piece
            found |= characters
        return "".join(sorted(found))

    def tokenize(self, plan: Plan, tokenizer: DataTokenizer, end_of_text: int | None, report: Report) -> None:
        """Write the shards of every piece that is not there yet."""
        record = tokenizer.record()
        arguments = [(cut, record, end_of_text) for cut in plan.cuts]
        for _ in self._run(_write_piece, plan, arguments, "tokenizing", report):
            pass

    def _run(
        self, function: Callable[..., Any], plan: Plan, arguments: list[tuple[Any, ...]], what: str, report: Report
    ) -> Iterator[tuple[Piece, Any]]:
        total, done = plan.documents, 0

        def tick(count: int) -> None:
            nonlocal done
            done += count
            report(min(done, total), total, what)

        tick(0)
        tasks = list(zip(plan.pieces, arguments, strict=True))
        if self._pool is None:
            for piece, values in tasks:
                yield piece, function(piece, *values, self._job, self._hub, self._out, tick)
            return
        self._done.value = 0
        waiting: dict[Future[Any], Piece] = {
            self._pool.submit(_in_worker, function, piece, *values): piece for piece, values in tasks
        }
        while waiting:
            ended, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            report(min(self._done.value, total), total, what)
            for future in ended:
                yield waiting.pop(future), _result(future)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise StorageError(
            "a process that prepares data ended without a word; the system may be short of memory. "
            "What is done is kept: give the same command again, with fewer --workers."
        ) from error


# What a process of its own keeps between the pieces it is given.
_worker: tuple[Any, ...] = ()


def _start_worker(job: TextJob, hub: Mapping[str, Any], out: str, stop: Any, done: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one tells the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as were asked for
    _worker = (job, hub, Path(out), stop, done)


def _in_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    job, hub, out, stop, done = _worker

    def tick(count: int) -> None:
        if stop.is_set():
            raise _StoppedError
        with done.get_lock():
            done.value += count

    return function(*arguments, job, hub, out, tick)


def _find_characters(piece: Piece, job: TextJob, hub: Mapping[str, Any], out: Path, tick: Tick) -> set[str]:
    found: set[str] = set()
    for document in documents_of(piece, job, None, hub):
        for block in document.blocks:
            found |= set(block)
        tick(1)
    return found


def _write_piece(
    piece: Piece,
    cut: Cut,
    record: Mapping[str, Any],
    end_of_text: int | None,
    job: TextJob,
    hub: Mapping[str, Any],
    out: Path,
    tick: Tick,
) -> None:
    note = _note(out, piece)
    if note.is_file() and _is_there(out, json.loads(note.read_text(encoding="utf-8"))):
        tick(piece.rows)
        return
    writer = PieceWriter(
        job, _from_record(json.dumps(record), out), end_of_text, out=out, held_out=out / _WORK, hub=hub
    )
    write_json(note, writer.write(piece, cut, tick))


@lru_cache(maxsize=1)
def _from_record(record: str, out: Path) -> DataTokenizer:
    return from_record(json.loads(record), out)


def _is_there(out: Path, note: Mapping[str, Any]) -> bool:
    """Whether every file that a note tells of has its size: a machine that loses power may lose the last of them."""
    for key, folder in (("kept", out), ("held_out", out / _WORK)):
        if key in note:
            shard = ShardRecord.model_validate(note[key]["shard"])
            for known in (shard.data, shard.lengths):
                path = folder / known.file
                if not path.is_file() or path.stat().st_size != known.size:
                    return False
    return True


def _note(out: Path, piece: Piece) -> Path:
    return out / _WORK / f"{piece.name}.json"


def _index(
    job: TextJob, plan: Plan, tokenizer: DataTokenizer, end_of_text: int | None, out: Path, options: CorpusOptions
) -> Index:
    notes = [(piece, json.loads(_note(out, piece).read_text(encoding="utf-8"))) for piece in plan.pieces]
    tallies: dict[str, list[dict[str, Any]]] = {}
    for piece, note in notes:
        tallies.setdefault(piece.split, []).append(note.get("kept"))
        if "held_out" in note:
            tallies.setdefault(VALIDATION, []).append(note["held_out"])
    splits: dict[str, SplitRecord] = {}
    for split, found in tallies.items():
        parts = [tally for tally in found if tally is not None]
        shards = [ShardRecord.model_validate(tally["shard"]) for tally in parts]
        if split == VALIDATION and any("held_out" in note for _, note in notes):
            shards = [merge_shards(out / _WORK, shards, out / f"{VALIDATION}-00000.bin")]
        splits[split] = SplitRecord(
            tokens=sum(shard.tokens for shard in shards),
            documents=sum(shard.documents for shard in shards),
            shards=shards,
            answers=[answer for tally in parts for answer in tally["answers"]],
            choices=CHOICES if job.choices else 0,
            **{key: sum(tally[key] for tally in parts) for key in ("bytes", "source_bytes", "source_words")},
        )
    empty = [split for split, record in splits.items() if record.tokens == 0]
    if empty:
        raise ConfigError(
            f"split {empty[0]!r} of {job.source or job.name} has no text at all; there is nothing to learn."
        )
    record = _tokenizer_record(tokenizer, end_of_text, out)
    settings = options.model_dump(mode="json")
    settings["source"] = Path(job.source).name if job.source else job.hub
    return Index(
        format="tost-tokens",
        version=1,
        name=job.name,
        fingerprint=content_fingerprint(record.fingerprint, splits),
        dtype=cast(Literal["uint8", "uint16", "uint32"], token_dtype(tokenizer.vocab_size).name),
        tokenizer=record,
        splits=splits,
        source=plan.facts,
        settings={**settings, "split": plan.split},
    )


def _tokenizer_record(tokenizer: DataTokenizer, end_of_text: int | None, out: Path) -> TokenizerRecord:
    known = tokenizer.record()
    path = out / TOKENIZER_FILE
    file = FileRecord(file=path.name, size=path.stat().st_size, sha256=hash_file(path)) if "file" in known else None
    return TokenizerRecord(
        kind=known["kind"],
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        end_of_text=end_of_text,
        characters=known.get("characters"),
        file=file,
    )
