"""Write the measured lines (cost, expect, checked) into the header of a configuration from runs of it.

python scripts/fill_recipe_header.py src/tost/recipes/configs/demo/digits.yaml runs/digits-0 runs/digits-1 runs/digits-2

The runs differ in their seed only. Each has to be finished, and to have the settings that the file has now.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from tost._text import count as quantity
from tost._yaml import write_value
from tost.errors import ConfigError
from tost.recipes import load_config
from tost.train.config import RunConfig

__all__ = ["Run", "filled", "main", "read_run"]


class Run(NamedTuple):
    """What a run folder tells."""

    config: RunConfig
    summary: dict[str, Any]
    environment: dict[str, Any]
    day: str


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        SystemExit: It is not the folder of a finished run.
    """
    try:
        config = load_config(str(folder / "config.yaml"))
        summary = json.loads((folder / "summary.json").read_text())
        environment = json.loads((folder / "env.json").read_text())
    except (ConfigError, OSError, ValueError) as error:
        raise SystemExit(f"{folder} is not the folder of a finished run: {error}") from None
    if summary["steps"] != config.train.steps:
        raise SystemExit(f"{folder} stopped at step {summary['steps']} of {config.train.steps}; finish it first")
    day = datetime.fromtimestamp((folder / "summary.json").stat().st_mtime, UTC)
    return Run(config, summary, environment, f"{day:%Y-%m-%d}")


def filled(text: str, config: RunConfig, runs: Sequence[Run]) -> str:
    """Return the text of a configuration file with its header filled in.

    Args:
        text: The file.
        config: What the file says.
        runs: Runs of it.

    Raises:
        SystemExit: A run had other settings, two runs had the same seed, or the header has no command.
    """
    for run in runs:
        if different := sorted(_flat(config).items() ^ _flat(run.config).items()):
            keys = ", ".join(dict.fromkeys(key for key, _ in different))
            raise SystemExit(f"a run had other settings than the file: {keys}; run it again as it is now")
    if len({run.config.train.seed for run in runs}) < len(runs):
        raise SystemExit("two runs had the same seed; give each its own train.seed")
    text = re.sub(r"^#   (cost|expect|checked) .*\n", "", text, flags=re.MULTILINE)
    lines = {"cost": _cost(runs), "expect": _expect(config, runs), "checked": _checked(runs)}
    measured = "".join(f"#   {name:<7}  {content}\n" for name, content in lines.items())
    text, count = re.subn(r"^(#   run .*\n)", lambda match: match[1] + measured, text, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"the header needs exactly one line `#   run      tost train ...`, it has {count}")
    return text


def _flat(config: RunConfig) -> dict[str, str]:
    """Return everything that the result may depend on by dotted key; seed and places on this machine are left out."""
    values = config.model_dump(mode="json")
    flat = {"recipe": repr(values.pop("recipe"))}
    flat |= {f"{section}.{key}": repr(value) for section, entries in values.items() for key, value in entries.items()}
    del flat["train.seed"], flat["data.path"]
    flat["train.init_from"] = "random weights" if config.train.init_from is None else "trained weights"
    return flat


def _places(config: RunConfig) -> list[str]:
    """Return the overrides that say where a run found its data and its first weights: a file cannot know that."""
    places = {"data.path": config.data.path, "train.init_from": config.train.init_from}
    return [f"{key}={write_value(value)}" for key, value in places.items() if value is not None]


def _cost(runs: Sequence[Run]) -> str:
    minutes = median(run.summary["seconds"] for run in runs) / 60
    memory = max(run.summary["peak_memory_bytes"] for run in runs) / 1e9
    machines = dict.fromkeys(
        f"{run.environment['cpu']}, {quantity(run.environment['threads'], 'thread')}" for run in runs
    )
    return f"{minutes:.1f} min on {' and '.join(machines)}; {memory:.2f} GB"


def _expect(config: RunConfig, runs: Sequence[Run]) -> str:
    chosen = config.checkpoint.best_metric
    found = []
    for metric in [chosen] if chosen else sorted(runs[0].summary["final"]):
        values = [run.summary["final"][metric] for run in runs]
        spread = f" ({min(values):.4g} to {max(values):.4g} over {len(runs)} seeds)" if len(runs) > 1 else " (one seed)"
        found.append(f"{metric} {mean(values):.4g}{spread}")
    return f"{', '.join(found)} at step {config.train.steps}"


def _checked(runs: Sequence[Run]) -> str:
    revisions = dict.fromkeys(str(run.summary["revision"]) for run in runs)
    return f"{max(run.day for run in runs)}, revision {' and '.join(revisions)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="YAML file whose header is filled")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, one per seed")
    options = parser.parse_args(arguments)
    runs = [read_run(folder) for folder in options.runs]
    text = filled(options.config.read_text(), load_config(str(options.config), _places(runs[0].config)), runs)
    options.config.write_text(text)
    sys.stdout.write("\n".join(text.splitlines()[:5]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
