"""The files of a measurement: whole or not at all, and only behind a green gate."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from tost.bench.harness.gate import GateResult

__all__ = ["Measured", "require_green", "write_atomically", "write_measurement"]


class Measured(Protocol):
    """A measurement that can be stored."""

    @property
    def gate(self) -> GateResult:
        """The checks of what was measured."""

    @property
    def stem(self) -> str:
        """File name without its ending."""

    @property
    def complete(self) -> bool:
        """Whether it came to its end."""

    def to_json(self) -> dict[str, object]:
        """Return one object of plain types."""


def require_green(gate: GateResult) -> None:
    """Refuse to show speeds of something that is wrong.

    Raises:
        ValueError: A check failed.
    """
    if not gate.passed:
        raise ValueError(f"{gate.summary}; speeds are shown only behind a green gate.")


def write_measurement(report: Measured, folder: Path, others: Callable[[], Mapping[str, str | bytes]]) -> list[Path]:
    """Write the files of a measurement.

    One that is not complete goes to ``<stem>.partial.json`` and leaves the files of an earlier, complete one alone. A
    complete one is written as JSON and whatever else there is, and its partial file is removed.

    Args:
        report: A measurement behind a green gate.
        folder: Where to write; made if missing.
        others: Makes the files beside the JSON, by the rest of their names after the stem.

    Returns:
        The files written.

    Raises:
        ValueError: The gate is red.
    """
    require_green(report.gate)
    text = json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"
    partial = folder / f"{report.stem}.partial.json"
    if not report.complete:
        write_atomically(partial, text.encode())
        return [partial]
    contents = {".json": text, **others()}
    paths = [folder / f"{report.stem}{ending}" for ending in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomically(path, content.encode() if isinstance(content, str) else content)
    partial.unlink(missing_ok=True)
    return paths


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file such that no reader sees half of it, and no crash leaves half of it.

    Args:
        path: File to write; missing folders are made.
        content: What it will hold.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own the draft gets the permissions of any other file, which a temporary file would not.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        draft = Path(folder) / path.name
        draft.write_bytes(content)
        draft.replace(path)
