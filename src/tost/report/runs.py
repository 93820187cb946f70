"""Read run folders for the page. A missing or damaged file costs its part of the page and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tost._text import count, html_card, number, real
from tost._yaml import read_document
from tost.errors import ConfigError
from tost.report.html import cut
from tost.train.history import was_resumed

PARTS = ("config.yaml", "env.json", "metrics.jsonl", "summary.json")
LAYERS = "compression/layer_"
"""What metrics are called that `evaluate.telemetry` adds, before the number of the layer."""
_MOST_TEXT = 30_000
_OF_STEPS = ("kind", "step", "loss", "tokens_per_second", "unit")


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds; what could not be read is empty.

    Attributes:
        name: What to call it, different from that of every other run on the page.
        folder: Its folder.
        config: The configuration, nested.
        config_text: The same as it stands in the file.
        environment: Versions, machine and command.
        summary: How it ended.
        steps: Records of training steps.
        evaluations: Records of the validation set.
        problems: What is missing or damaged, in sentences.
        resumed: Whether it was interrupted and resumed; its summary then has the time since.
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
    def recipe(self) -> str:
        """The kind of training."""
        return str(self.setting("recipe", "unknown"))

    @property
    def subject(self) -> tuple[str, str]:
        """What runs must share to be compared: the kind of training and the data, by the name of its folder if any."""
        path = self.setting("data.path")
        return self.recipe, Path(str(path)).name if path else str(self.setting("data.name", "unknown"))

    @property
    def status(self) -> str:
        """``finished``, ``failed`` or ``interrupted`` as the run itself said; else ``unfinished``."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def last_step(self) -> int | None:
        """The last step of which there is a record."""
        found = [int(record["step"]) for record in (*self.steps, *self.evaluations)]
        return max(found, default=None)

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the last evaluation, without those of single layers."""
        given = self.summary.get("final")
        metrics = given if isinstance(given, Mapping) and given else (self.evaluations or ({},))[-1]
        return {
            str(name): float(value)
            for name, value in metrics.items()
            if real(value) is not None and name != "step" and not str(name).startswith(LAYERS)
        }

    @property
    def metric(self) -> tuple[str, str]:
        """The metric that the run is judged by, and whether ``max`` or ``min`` of it is best."""
        if chosen := self.setting("checkpoint.best_metric"):
            return str(chosen), str(self.setting("checkpoint.best_mode", "min"))
        return ("accuracy", "max") if "accuracy" in self.final else ("loss", "min")

    def curve(self, metric: str) -> list[tuple[float, float]]:
        """Return the step and the value of a metric in every evaluation that has it."""
        return _points(self.evaluations, metric)

    def training_curve(self, metric: str = "loss") -> list[tuple[float, float]]:
        """Return the step and the value of a metric of training."""
        return _points(self.steps, metric)

    def best(self, metric: str, mode: str) -> tuple[float, float] | None:
        """Return step and value of the best evaluation."""
        return min(self.curve(metric), key=lambda point: -point[1] if mode == "max" else point[1], default=None)


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read several run folders and give each a name of its own, as short as possible.

    Raises:
        ConfigError: A folder is not there or holds no run.
    """
    places = list(dict.fromkeys(folder.resolve() for folder in folders))
    parts = [place.parts[1:] or ("run",) for place in places]
    names = ["/".join(part[-1:]) for part in parts]
    length = 1
    while len(set(names)) < len(names) and length < max(map(len, parts)):
        length += 1
        names = ["/".join(part[-length:]) for part in parts]
    return [read_run(place, name) for place, name in zip(places, names, strict=True)]


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read a run folder.

    Args:
        folder: Where it is.
        name: What to call it; by default what its folder is called.

    Raises:
        ConfigError: There is no such folder, or nothing of a run is in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder of a run, as `tost train --out DIR` made it.")
    if not any((folder / part).is_file() for part in PARTS):
        raise ConfigError(f"{folder} holds no run: none of {', '.join(PARTS)} is in it; give the folder of a run.")
    reader = _Reader(folder)
    config, config_text = reader.config()
    records = reader.records()
    return RunRecord(
        name=name or folder.resolve().name,
        folder=folder,
        config=config,
        config_text=cut(config_text, _MOST_TEXT),
        summary=reader.object("summary.json", "status"),
        environment=reader.object("env.json", "command"),
        steps=tuple(record for record in records if record.get("kind") == "step"),
        evaluations=tuple(record for record in records if record.get("kind") == "evaluation"),
        problems=tuple(reader.problems),
        resumed=was_resumed(folder),
    )


_CONSEQUENCES = {
    "config.yaml": "what was trained is not known.",
    "env.json": "machine, versions and command are not known.",
    "metrics.jsonl": "there are no curves.",
    "summary.json": "the run has not ended yet, or was killed; the numbers are those of its last record.",
}


class _Reader:
    """Reads the files of a run folder, and notes what is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def complain(self, name: str, problem: str) -> None:
        self.problems.append(f"{name} {problem}: {_CONSEQUENCES[name]}")

    def open(self, name: str) -> TextIO | None:
        try:
            return (self.folder / name).open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            self.complain(name, "is missing")
        except OSError as error:
            self.complain(name, f"cannot be read ({error.strerror})")
        return None

    def text(self, name: str) -> str | None:
        if (file := self.open(name)) is None:
            return None
        with file:
            return file.read()

    def config(self) -> tuple[dict[str, Any], str]:
        """Return the configuration, and the same as it stands in the file."""
        text = self.text("config.yaml")
        if text is None:
            return {}, ""
        try:
            values = read_document(self.folder / "config.yaml").values
        except ConfigError as error:
            self.complain("config.yaml", f"is damaged ({error})")
            return {}, text
        if not isinstance(values.get("model"), dict):
            self.complain("config.yaml", "names no model")
        return values, text

    def object(self, name: str, key: str) -> dict[str, Any]:
        """Return the content of a JSON file that has a key."""
        if (text := self.text(name)) is None:
            return {}
        content = _parsed(text)
        if not isinstance(content, dict) or key not in content:
            self.complain(name, "is damaged")
            return {}
        return content

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``; of steps, which are many, only what is shown."""
        if (file := self.open("metrics.jsonl")) is None:
            return []
        found, broken = [], 0
        with file:
            for line in filter(str.strip, file):
                record = _parsed(line)
                if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                    broken += 1
                elif record.get("kind") == "step":
                    found.append({key: record[key] for key in _OF_STEPS if key in record})
                else:
                    found.append(record)
        if broken:
            total = broken + len(found)
            self.problems.append(f"{broken} of {total} lines of metrics.jsonl are damaged and were left out.")
        elif not found:
            self.problems.append("metrics.jsonl holds no records yet.")
        return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def processor(environment: Mapping[str, Any]) -> str:
    """Return processor and number of threads, as runs and measurements record them."""
    threads = environment.get("threads")
    written = count(threads, "thread") if isinstance(threads, int) else "? threads"
    return f"{environment.get('cpu', 'unknown')}, {written}"


def _points(records: Iterable[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    return [(float(r["step"]), float(r[metric])) for r in records if real(r.get(metric)) is not None]
