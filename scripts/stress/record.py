"""The file of results: what was done to which scenario, summed over all invocations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tost
from tost._io import write_json
from tost._machine import cpu_model
from tost._text import Table, duration, number


def load(path: Path) -> dict[str, Any]:
    """Return the results so far."""
    return json.loads(path.read_text()) if path.exists() else {"scenarios": {}}


def add(path: Path, name: str, about: str, counted: str, result: Mapping[str, Any]) -> None:
    """Add the result of a scenario to the file.

    Args:
        path: The file; made if there is none.
        name: The scenario.
        about: What happens in it.
        counted: What its kills are called.
        result: Counts, differences and seconds of one invocation.
    """
    content = load(path)
    before = content["scenarios"].get(name, {"counts": {}, "differences": [], "seconds": 0.0})
    counts = dict(before["counts"])
    for key, value in result["counts"].items():
        counts[key] = counts.get(key, 0) + value
    content["scenarios"][name] = {
        "about": about,
        "counted": counted,
        "counts": counts,
        "differences": [*before["differences"], *result["differences"]],
        "seconds": round(before["seconds"] + result["seconds"], 1),
    }
    content |= {"tost": tost.__version__, "cpu": cpu_model(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    write_json(path, content)


def summed(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of kills, other disturbances, comparisons and differences, and the seconds, of all."""
    every = content["scenarios"].values()
    return {
        "kills": sum(found["counts"].get("kills", 0) for found in every if found["counted"] == "kills"),
        "disturbances": sum(found["counts"].get("kills", 0) for found in every if found["counted"] != "kills"),
        "compared": sum(found["counts"].get("compared", 0) for found in every),
        "differences": sum(len(found["differences"]) for found in every),
        "seconds": sum(found["seconds"] for found in every),
    }


def table(content: Mapping[str, Any]) -> Table:
    """Return the results as a table, with the sum below."""
    rows = []
    for name, found in sorted(content["scenarios"].items()):
        counts = found["counts"]
        details = [
            f"{value} {key}" for key, value in sorted(counts.items()) if key not in ("kills", "compared") and value
        ]
        told = f"{number(counts.get('kills', 0))} {found['counted']}"
        amounts = [
            told,
            number(counts.get("compared", 0)),
            number(len(found["differences"])),
            duration(found["seconds"]),
        ]
        about = f"{found['about']} ({', '.join(details)})" if details else found["about"]
        rows.append([f"`{name}`", about, *amounts])
    total = summed(content)
    rows.append(
        [
            "together",
            f"and {number(total['disturbances'])} other disturbances",
            f"{number(total['kills'])} kills",
            number(total["compared"]),
            number(total["differences"]),
            duration(total["seconds"]),
        ]
    )
    return Table(
        headers=["scenario", "what happens", "how often", "compared", "differences", "time"], rows=rows, labels=2
    )
