"""Finding the sources of a corpus, their splits, and cutting them into pieces. The plan depends on the source alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tost.data import _tables
from tost.data.prepare import Report
from tost.data.text.corpora import TextJob
from tost.data.text.files import Hub, Kind, Span, find_files, plan_file, split_of_name
from tost.data.text.pieces import Cut, Piece, documents_of
from tost.errors import ConfigError

VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The pieces of a corpus and the validation set that is cut from them.

    Attributes:
        pieces: The pieces of every split, in order.
        cuts: The part of each piece that goes to the validation set.
        facts: The sources, for the index.
        seen: Identifies the sources as they were found; a resumed run must find the same.
        split: How the validation set was made, for the index.
    """

    pieces: list[Piece]
    cuts: list[Cut]
    facts: list[dict[str, Any]]
    seen: list[Any]
    split: dict[str, Any]

    @property
    def documents(self) -> int:
        """Number of documents of all pieces."""
        return sum(piece.rows for piece in self.pieces)

    def needs_separator(self, job: TextJob) -> bool:
        """Return whether documents would run into each other without a token between them."""
        return job.end_of_text == "auto" and not job.newlines and self.documents > 1


def load_hub(job: TextJob) -> dict[str, Any]:
    """Return the splits of a job's data set, of the hub or saved by `datasets`; none if it reads other files.

    Raises:
        ConfigError: It cannot be loaded.
    """
    if job.source is not None:
        return _load_saved(Path(job.source))
    if job.hub is None:
        raise ConfigError(f"{job.name} is read from files; give --source.")
    found: dict[str, Any] = {}
    splits = _tables.load_hub(
        job.hub.name, job.hub.config, revision=job.hub.revision, remedy="give --source with a copy on disk."
    )
    for name, data in splits.items():
        found.setdefault(split_of_name(Path(name), Path(name)) or "train", data)
    return found


def _load_saved(folder: Path) -> dict[str, Any]:
    """Return the splits of a folder that `save_to_disk` wrote; none if it is no such folder."""
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return {}
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
        splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        return {split_of_name(Path(name), Path(name)) or "train": data for name, data in splits.items()}
    except Exception as error:  # a damaged folder makes the library fail in many ways
        raise ConfigError(
            f"{folder} cannot be read as a folder of datasets.save_to_disk, it is empty or damaged: {error}"
        ) from error


def make_plan(job: TextJob, hub: Hub, report: Report) -> Plan:
    """Find the sources of a job, count their documents and cut them into pieces.

    Args:
        job: How the corpus is read.
        hub: Data sets of the hub by split.
        report: Receives the progress.

    Raises:
        ConfigError: A source is missing, cannot be read, or holds no documents.
    """
    root = Path(job.source or ".")
    spans: dict[str, list[Span]] = {}
    facts: list[dict[str, Any]] = []
    seen: list[Any] = []
    if hub:
        for split in _choose(job, {split: [split] for split in hub}):
            spans[split] = _hub_spans(split, hub[split], job)
            facts.append({"hub": job.hub or root.name, "split": split, "rows": len(hub[split])})
            seen.append([job.hub or str(root), split, len(hub[split]), getattr(hub[split], "_fingerprint", "")])
    else:
        sources = _choose(job, _group(job))
        total = sum(map(len, sources.values()))
        for split, found in sources.items():
            spans[split] = []
            for path, kind in found:
                report(len(facts), total, f"looking at {path.name}")
                spans[split] += plan_file(path, kind, job.shard_bytes)
                known = path.stat()
                name = path.relative_to(root).as_posix() if path.is_relative_to(root) and path != root else path.name
                facts.append({"file": name, "split": split, "size": known.st_size})
                seen.append([str(path), known.st_size, known.st_mtime_ns])
    pieces = [piece for split in spans for piece in _pieces(split, spans[split], job)]
    if not sum(piece.rows for piece in pieces):
        raise ConfigError(f"{job.title} holds no documents; there is nothing to prepare.")
    cuts, rule = _cut(job, pieces, hub, named=sorted(spans))
    return Plan(pieces=pieces, cuts=cuts, facts=facts, seen=seen, split=rule)


def _group(job: TextJob) -> dict[str, list[tuple[Path, Kind]]]:
    """Return the files of a job by split; the split of files without one in their name is empty."""
    groups: dict[str, list[tuple[Path, Kind]]] = {}
    for path, kind in _files(job, str(job.source)):
        groups.setdefault(split_of_name(path, Path(str(job.source))) or "", []).append((path, kind))
    return groups


def _files(job: TextJob, source: str) -> list[tuple[Path, Kind]]:
    lines = job.documents == "line" and not job.joined
    files = find_files(source, job.format)
    if job.choices and any(f"_{job.choices}_" in file.name for file, _ in files):
        files = [entry for entry in files if f"_{job.choices}_" in entry[0].name]
    return [(file, "lines" if format == "text" and lines else format) for file, format in files]


def _choose(job: TextJob, groups: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the sources of every split to prepare."""
    everything = [source for group in groups.values() for source in group]
    named = {split: group for split, group in groups.items() if split}
    if job.sources:
        return {"train": everything} | {split: _files(job, source) for split, source in job.sources.items()}
    if job.split in ("random", "tail"):
        # Of a hub data set the training split is the corpus; files are one corpus whatever they are called.
        return {"train": groups["train"] if groups.get("train") == ["train"] else sorted(everything)}
    if job.split == "auto":
        whole = "" in groups or "train" not in named or (len(named) < 2 and named["train"] != ["train"])
        return {"train": sorted(everything)} if whole else _ordered(named)
    if not named and len(job.splits) == 1:
        return {job.splits[0]: everything}
    wanted = {split: group for split, group in named.items() if not job.splits or split in job.splits}
    if not wanted:
        there = ", ".join(sorted(named)) or "none by its names"
        need = " or ".join(job.splits or ("train", "validation", "test"))
        raise ConfigError(
            f"{job.title} has the splits: {there}; need {need}. Call files or folders by their split, such as "
            "test.txt, or set splits to a single one."
        )
    return _ordered(wanted)


def _ordered(groups: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {split: groups[split] for split in ("train", VALIDATION, "test") if split in groups}


def _hub_spans(split: str, data: Any, job: TextJob) -> list[Span]:
    rows = len(data)
    step = max(1, rows * job.shard_bytes // max(1, int(data.data.nbytes)))
    ranges = ((start, min(start + step, rows)) for start in range(0, rows, step))
    return [Span(split, "hub", start, stop, stop - start) for start, stop in ranges]


def _pieces(split: str, spans: list[Span], job: TextJob) -> list[Piece]:
    """Put spans together until a piece is large enough. A joined split is a single document, so a single piece."""
    if job.joined:
        whole = tuple(span._replace(rows=int(place == 0)) for place, span in enumerate(spans))
        return [Piece(0, split, whole, 0)] if spans else []
    groups: list[list[Span]] = []
    size = 0
    for span in spans:
        if not groups or size >= job.shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(span)
        # A span of rows or row groups was made as large as a piece should be.
        size += job.shard_bytes if span.kind in ("parquet", "hub") else span.stop - span.start
    pieces: list[Piece] = []
    first = 0
    for number, group in enumerate(groups):
        pieces.append(Piece(number, split, tuple(group), first))
        first += pieces[-1].rows
    return pieces


_NOTHING = Cut(np.empty(0, dtype=np.int64))


def _cut(job: TextJob, pieces: list[Piece], hub: Hub, *, named: list[str]) -> tuple[list[Cut], dict[str, Any]]:
    """Decide which documents make up the validation set, if the source has none of its own."""
    if job.split == "named" or VALIDATION in named or job.validation == 0.0:
        return [_NOTHING] * len(pieces), {"rule": "named", "splits": named}
    count = sum(piece.rows for piece in pieces if piece.split == "train")
    if count == 1 and job.split != "random":
        cuts = [
            _cut_characters(job, piece, hub) if piece.split == "train" and piece.rows else _NOTHING for piece in pieces
        ]
        return cuts, {"rule": "tail", "validation": job.validation, "of": "characters"}
    held_out = math.ceil(job.validation * count)
    if held_out >= count:
        raise ConfigError(
            f"validation={job.validation} of {count} document(s) leaves none for training; give more documents, a "
            "smaller share, split=tail for a single text, or validation_source."
        )
    if job.split == "tail":
        chosen = np.arange(count - held_out, count)
        rule: dict[str, Any] = {"rule": "tail", "validation": job.validation}
    else:
        # As `datasets` draws it in `train_test_split`, so that a known seed gives the known documents.
        chosen = np.sort(np.random.default_rng(job.seed).permutation(count)[:held_out])
        rule = {"rule": "random", "validation": job.validation, "seed": job.seed}
    cuts = [_NOTHING] * len(pieces)
    for place, piece in enumerate(pieces):
        if piece.split == "train":
            cuts[place] = Cut(chosen[(chosen >= piece.first) & (chosen < piece.first + piece.rows)])
    return cuts, rule


def _cut_characters(job: TextJob, piece: Piece, hub: Hub) -> Cut:
    """Cut the only document; where its bytes are not text, one of them counts as a character."""
    characters = sum(len(block) for block in next(documents_of(piece, job, hub)).blocks)
    after = int(characters * (1 - job.validation))
    if not 0 < after < characters:
        raise ConfigError(f"{job.title} has {characters} characters, too few to cut off a validation set.")
    return _NOTHING._replace(after=after)
