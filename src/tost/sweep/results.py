"""Results of a sweep, gathered from its run folders into one JSON file. Loads no torch.

::

    results.json
      plan        the plan, by its own keys
      changes     what the command line changed for all arms
      command     the command of the sweep
      collected   when the file was written, in UTC
      runs        for every run: arm, seed, status, hash of its configuration, changes, command, parameters, steps,
                  samples, metrics, best, seconds, memory, revision, machine, the weights it started from
      arms        for every arm: what it chose, if something is tuned; seeds, parameters, steps, samples; of every
                  metric mean, std, min, max over the seeds

Paths are cut to their last part: results are published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tost._io import write_atomic
from tost._machine import command_arguments
from tost.errors import ConfigError
from tost.sweep.plan import Plan
from tost.sweep.runs import Run, State, chosen_trial, state_of
from tost.train.config import config_hash
from tost.train.history import read_record, was_resumed

FORMAT = 1
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_SET_BY_SWEEP = ("train.seed", "train.init_from")

Results = dict[str, Any]


def collect(name: str, plan: Plan, changes: Sequence[str], runs: Sequence[Run]) -> Results:
    """Gather what the folders of all runs hold now.

    Args:
        name: Name of the plan; of a file, its last part without the suffix is kept.
        plan: The plan.
        changes: ``key=value`` texts that the command line added.
        runs: All runs of the sweep, finished or not.

    Returns:
        The content of ``results.json``.
    """
    records = [_record(run) for run in runs]
    return {
        "format": FORMAT,
        "name": Path(name).stem,
        "plan": plan.model_dump(mode="json", exclude_defaults=True),
        "changes": [_published(change) for change in changes],
        "command": ["tost", *command_arguments()],
        "collected": datetime.now(UTC).strftime(_TIME),
        "complete": all(record["status"] == State.finished for record in records),
        "runs": records,
        "arms": {arm: _arm(plan, arm, runs, records) for arm in plan.arms},
    }


def _arm(plan: Plan, name: str, runs: Sequence[Run], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of an arm, with the value that it chose of what is tuned."""
    own = [record for record in records if record["arm"] == name]
    if plan.tune is None:
        return _aggregate(own)
    chosen = chosen_trial(plan, name, runs)
    return {"trial": chosen, **_aggregate([record for record in own if record["trial"] == chosen])}


def _record(run: Run) -> dict[str, Any]:
    """Return what is known about one run; None for what is not known yet."""
    state = state_of(run)
    # A run that was started again still has the summary of its last end.
    summary = read_record(run.folder / "summary.json") if state is State.finished else {}
    environment = read_record(run.folder / "env.json")
    start = read_record(run.folder / "start.json")  # which weights, by their content; the path is private
    return {
        "arm": run.arm,
        "seed": run.seed,
        **({"trial": run.trial} if run.trial else {}),
        "status": str(state),
        "config": run.config,
        "config_hash": config_hash(run.settings),
        "changes": [_published(text) for text in run.changes if text.partition("=")[0] not in _SET_BY_SWEEP],
        "command": environment.get("command"),
        "parameters": summary.get("parameters"),
        "steps": summary.get("steps"),
        "samples": summary["steps"] * run.settings.train.batch_size if "steps" in summary else None,
        "metrics": {name: _finite(value) for name, value in summary.get("final", {}).items()},
        "best": _finite(summary.get("best")),
        "best_metric": run.settings.checkpoint.best_metric,
        "seconds": summary.get("seconds"),
        "resumed": was_resumed(run.folder),
        "peak_memory_bytes": summary.get("peak_memory_bytes"),
        "revision": summary.get("revision"),
        "start": {key: start[key] for key in ("sha256", "loaded", "fresh")} if start else None,
        "machine": _machine(environment),
        "finished": _time(run.folder / "summary.json") if summary else None,
    }


def _time(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime(_TIME)


def _machine(environment: Mapping[str, Any]) -> dict[str, Any] | None:
    if not environment:
        return None
    versions = environment.get("versions", {})
    kept = {name: environment.get(name) for name in ("cpu", "threads", "device", "platform", "python")}
    return {**kept, "torch": versions.get("torch"), "tost": versions.get("tost")}


def _aggregate(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the finished runs of an arm have in common, and the spread of what they have not."""
    done = [record for record in records if record["status"] == State.finished]
    names = dict.fromkeys(name for record in done for name in record["metrics"])
    best_metric = _common([record["best_metric"] for record in done])
    return {
        "seeds": [record["seed"] for record in done],
        **{key: _common([record[key] for record in done]) for key in ("parameters", "steps", "samples")},
        "seconds": fmean(record["seconds"] for record in done) if done else None,
        "metrics": {name: _spread([record["metrics"].get(name) for record in done]) for name in names},
        "best_metric": best_metric,
        "best": _spread([record["best"] for record in done]) if best_metric else None,
    }


def _common(values: Sequence[Any]) -> Any:
    """Return the value that all share, None if they do not."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Return mean, sample standard deviation (None for one value), least and greatest; None if a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": fmean(known), "std": stdev(known) if len(known) > 1 else None, "min": min(known), "max": max(known)}


def _finite(value: float | None) -> float | None:
    """Return a number that JSON can hold."""
    return value if value is not None and isfinite(value) else None


def _published(change: str) -> str:
    key, equals, value = change.partition("=")
    return f"{key}{equals}{Path(value).name}" if Path(value).is_absolute() else change


def metric_problem(results: Results) -> str:
    """Say what is wrong if finished runs lack the metric of the plan; empty if nothing is."""
    metric = results["plan"]["metric"]
    for record in results["runs"]:
        if record["status"] == State.finished and metric not in record["metrics"]:
            names = ", ".join(record["metrics"]) or "none"
            return f"{record['arm']} has no metric {metric}; it has: {names}. Set `metric` of the plan to one of them"
    return ""


def write_results(path: Path, results: Results) -> None:
    """Write results so that a reader sees the old file or the new one, never a part of it."""
    write_atomic(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> Results:
    """Read stored results.

    Raises:
        ConfigError: The file is not one of them.
    """
    results = read_record(path)
    if results.get("format") != FORMAT:
        raise ConfigError(f"{path} does not hold the results of a sweep in format {FORMAT}; make it with `tost sweep`")
    return results
