"""Read what a run has left in its folder. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tost._io import read_json
from tost.errors import TostError


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a run; empty if it is missing, damaged or not an object."""
    try:
        content = read_json(path)
    except TostError:
        return {}
    return content if isinstance(content, dict) else {}


def was_resumed(folder: Path) -> bool:
    """Return whether a run was interrupted and resumed; its summary then has the time since the last interruption."""
    try:
        with (folder / "log.txt").open(encoding="utf-8", errors="replace") as lines:
            return any(line.startswith("resumed from ") for line in lines)
    except OSError:
        return False
