"""Runs as rows of a table, and how their configurations differ. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tost._text import UNKNOWN, duration, number, real, rounded
from tost._yaml import flatten
from tost.report.runs import RunRecord

DEPTH = 4
"""Folders below the one that is searched in which runs are found."""
_NOT_SETTINGS = ("name", "log.", "checkpoint.keep")


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders below a folder, sorted by path; links are not followed.

    Args:
        folder: Where to look; it may be a run itself.
    """
    found = []
    for place, folders, files in os.walk(folder):
        here = Path(place)
        if "config.yaml" in files and {"env.json", "metrics.jsonl", "summary.json"} & set(files):
            found.append(here)
            folders.clear()
        elif len(here.relative_to(folder).parts) >= DEPTH:
            folders.clear()
    return sorted(found)


def summarize(run: RunRecord) -> dict[str, Any]:
    """Return what is worth knowing of a run, as plain data; None for what its files do not say."""
    metric, mode = run.metric
    best = run.best(metric, mode)
    speeds = [value for step in run.steps if (value := real(step.get("tokens_per_second"))) is not None]
    return {
        "run": run.name,
        "status": run.status,
        "model": run.setting("model.name"),
        "data": run.subject[1],
        "steps": run.last_step,
        "of_steps": run.setting("train.steps"),
        "metric": metric,
        "best": None if best is None else best[1],
        "best_step": None if best is None else int(best[0]),
        "parameters": run.summary.get("parameters"),
        "speed": median(speeds) if speeds else None,
        "unit": next((str(step["unit"]) for step in run.steps if "unit" in step), None),
        "seconds": real(run.summary.get("seconds")),
    }


def as_cells(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return a summary as the cells of a row."""
    best = UNKNOWN if summary["best"] is None else f"{summary['metric']} {number(summary['best'])}"
    speed = UNKNOWN if summary["speed"] is None else f"{number(summary['speed'], 3)} {summary['unit'] or ''}/s"
    return {
        "run": str(summary["run"]),
        "status": str(summary["status"]),
        "model": str(summary["model"] or UNKNOWN),
        "data": str(summary["data"]),
        "steps": f"{number(summary['steps'])}/{number(summary['of_steps'])}",
        "best": best,
        "parameters": rounded(summary["parameters"]),
        "speed": speed,
        "time": duration(summary["seconds"]),
    }


def differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, by dotted key: their values, None where a run has no such setting."""
    flat = [flatten(dict(run.config)) for run in runs]
    keys = sorted({key for settings in flat for key in settings if not key.startswith(_NOT_SETTINGS)})
    values = {key: [settings.get(key) for settings in flat] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}
