"""Comparison of runs and folders, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tost.train.checkpoint.files import MANIFEST, verify

BATCHES = "batches.txt"
"""File that a victim records the hash of every training batch in; see `training.record_batches`."""
TIMED = {"tokens_per_second", "seconds_per_step", "mfu", "memory_bytes", "eta_seconds"}
"""What metrics.jsonl holds that depends on the clock."""


def compare_runs(reference: Path, victim: Path) -> list[str]:
    """Return what differs between two finished runs: files of the last checkpoint, records, data of the steps."""
    found = []
    first, second = (folder / "checkpoints" / "last" for folder in (reference, victim))
    if not second.exists():
        return ["there is no last checkpoint"]
    found += [f"last checkpoint: {text}" for text in compare_folders(first, second, without=MANIFEST)]
    if records(reference) != records(victim):
        found.append("metrics.jsonl")
    if (reference / "config.yaml").read_bytes() != (victim / "config.yaml").read_bytes():
        found.append("config.yaml")
    for path in (victim / "checkpoints").glob("step-*"):
        if problem := verify(path):
            found.append(f"{path.name}: {problem}")
    return found + compare_batches(reference / BATCHES, victim / BATCHES)


def compare_folders(reference: Path, victim: Path, without: str = "") -> list[str]:
    """Return the names of files that only one of two folders has, or that have another content."""
    first, second = (_contents(folder, without) for folder in (reference, victim))
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def compare_batches(reference: Path, victim: Path) -> list[str]:
    """Return which steps had other training data, whether they were taken once or, after a kill, several times."""
    if not reference.exists():
        return []
    right = dict(line.rsplit(" ", 1) for line in reference.read_text().splitlines())
    seen = [line.rsplit(" ", 1) for line in victim.read_text().splitlines()]
    wrong = {place for place, batch in seen if right.get(place) != batch}
    missing = right.keys() - {place for place, _ in seen}
    return [f"data of step {place}" for place in sorted(wrong | missing)]


def records(run: Path) -> list[dict[str, Any]]:
    """Return what metrics.jsonl says that does not depend on the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMED} for line in lines]


def _contents(folder: Path, without: str) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != without]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
