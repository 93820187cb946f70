"""Read run folders and compare them. Missing or damaged files are skipped, with a note. Loads no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tost._text import UNKNOWN, duration, html_card, number, real, rounded
from tost._yaml import flatten, read_document
from tost.errors import ConfigError
from tost.train.metrics import was_resumed

LAYERS = "compression/"
"""Prefix of the metrics that `evaluate.telemetry` adds for each layer."""
_STEP_KEYS = ("kind", "step", "loss", "tokens_per_second", "unit")
_DEPTH = 4  # folders below the one that is searched
_NOT_SETTINGS = ("name", "log.", "checkpoint.keep")
# The files of a run, and what is unknown without each.
_FILES = {
    "config.yaml": "the configuration is not known.",
    "env.json": "machine, versions and command are not known.",
    "metrics.jsonl": "there are no curves.",
    "summary.json": "the run has not ended yet, or was killed; the numbers are those of its last record.",
}


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder; what could not be read is empty.

    Attributes:
        name: Unique among the runs that were read together.
        folder: Its folder.
        config: The configuration, nested.
        config_text: ``config.yaml`` as it is.
        environment: Versions, machine and command.
        summary: How it ended.
        steps: Records of training steps.
        evaluations: Records of evaluations.
        problems: What is missing or damaged, in sentences.
        resumed: Whether it was interrupted and resumed; the time in its summary is then since the last start.
    """

    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    problems: tuple[str, ...] = ()
    resumed: bool = False

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        steps = f"{number(self.last_step)} of {number(self.setting('train.steps'))}"
        metrics = {name: number(value) for name, value in self.final.items()}
        return html_card(self.name, {"status": self.status, "steps": steps, **metrics})

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a value of the configuration by its dotted key."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return default if value is None else value

    @property
    def subject(self) -> tuple[str, str]:
        """Task and data, which runs must share to be compared."""
        path = self.setting("data.path")
        data = Path(str(path)).name if path else str(self.setting("data.name", "unknown"))
        return str(self.setting("recipe", "unknown")), data

    @property
    def status(self) -> str:
        """``finished``, ``failed`` or ``interrupted`` as in the summary; without one ``unfinished``."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def last_step(self) -> int | None:
        """The last step that has a record."""
        return max((int(record["step"]) for record in (*self.steps, *self.evaluations)), default=None)

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the last evaluation, without single layers."""
        given = self.summary.get("final")
        metrics = given if isinstance(given, Mapping) and given else (self.evaluations or ({},))[-1]
        return {
            str(name): float(value)
            for name, value in metrics.items()
            if real(value) is not None and name != "step" and not str(name).startswith(LAYERS)
        }

    @property
    def metric(self) -> tuple[str, str]:
        """The metric that decides which run is best, and its direction, ``max`` or ``min``."""
        if chosen := self.setting("checkpoint.best_metric"):
            return str(chosen), str(self.setting("checkpoint.best_mode", "min"))
        return ("accuracy", "max") if "accuracy" in self.final else ("loss", "min")

    def curve(self, metric: str, *, training: bool = False) -> list[tuple[float, float]]:
        """Return ``(step, value)`` of a metric in all evaluations, or training steps, that have it."""
        records = self.steps if training else self.evaluations
        return [(float(r["step"]), float(r[metric])) for r in records if real(r.get(metric)) is not None]

    def best(self) -> tuple[float, float] | None:
        """Return step and value of the best evaluation by `metric`."""
        metric, mode = self.metric
        return (max if mode == "max" else min)(self.curve(metric), key=lambda point: point[1], default=None)


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read several run folders and give each a unique name, as short as possible.

    Raises:
        ConfigError: A folder is not there or holds no run.
    """
    places = list(dict.fromkeys(folder.resolve() for folder in folders))
    parts = [place.parts[1:] or ("run",) for place in places]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return [read_run(place, name) for place, name in zip(places, names, strict=True)] if places else []


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read a run folder.

    Args:
        folder: Where it is.
        name: Its name; by default the name of its folder.

    Raises:
        ConfigError: There is no such folder, or it holds no run.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder of a run, as `tost train --out DIR` made it.")
    if not any((folder / file).is_file() for file in _FILES):
        raise ConfigError(f"{folder} holds no run: none of {', '.join(_FILES)} is in it; give the folder of a run.")
    problems: list[str] = []

    def complain(file: str, problem: str) -> None:
        problems.append(f"{file} {problem}: {_FILES[file]}")

    texts = {}
    for file in _FILES:
        try:
            texts[file] = (folder / file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            complain(file, "is missing" if missing else f"cannot be read ({error.strerror})")
    config: dict[str, Any] = {}
    if "config.yaml" in texts:
        try:
            config = read_document(folder / "config.yaml").values
            if not isinstance(config.get("model"), dict):
                complain("config.yaml", "names no model")
        except ConfigError as error:
            complain("config.yaml", f"is damaged ({error})")
    contents: dict[str, dict[str, Any]] = {}
    for file, key in (("env.json", "command"), ("summary.json", "status")):
        content = _parse(texts[file]) if file in texts else {}
        if file in texts and key not in content:
            complain(file, "is damaged")
        contents[file] = content if key in content else {}
    lines = [line for line in texts.get("metrics.jsonl", "").split("\n") if line.strip()]
    records = [record for record in map(_parse, lines) if isinstance(record.get("step"), int)]
    if len(records) < len(lines):
        problems.append(f"{len(lines) - len(records)} of {len(lines)} lines of metrics.jsonl are damaged and skipped.")
    elif not records and "metrics.jsonl" in texts:
        problems.append("metrics.jsonl holds no records yet.")
    steps = (record for record in records if record.get("kind") == "step")
    return RunRecord(
        name=name or folder.resolve().name,
        folder=folder,
        config=config,
        config_text=texts.get("config.yaml", ""),
        environment=contents["env.json"],
        summary=contents["summary.json"],
        steps=tuple({key: step[key] for key in _STEP_KEYS if key in step} for step in steps),
        evaluations=tuple(record for record in records if record.get("kind") == "evaluation"),
        problems=tuple(problems),
        resumed=was_resumed(folder),
    )


def _parse(text: str) -> dict[str, Any]:
    """Return a JSON object; empty for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders below a folder (or itself), sorted by path; links are not followed."""
    found = []
    for place, folders, files in os.walk(folder):
        here = Path(place)
        if "config.yaml" in files and {"env.json", "metrics.jsonl", "summary.json"} & set(files):
            found.append(here)
            folders.clear()
        elif len(here.relative_to(folder).parts) >= _DEPTH:
            folders.clear()
    return sorted(found)


def summarize(run: RunRecord) -> dict[str, Any]:
    """Return the main facts of a run as plain data; None for what is not known."""
    best = run.best()
    speeds = [value for _, value in run.curve("tokens_per_second", training=True)]
    return {
        "run": run.name,
        "status": run.status,
        "model": run.setting("model.name"),
        "data": run.subject[1],
        "steps": run.last_step,
        "of_steps": run.setting("train.steps"),
        "metric": run.metric[0],
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
