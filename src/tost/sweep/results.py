"""Results of a sweep, gathered from its run folders into one JSON file. Loads no torch, unless states are measured.

::

    results.json
      plan        the plan, by its own keys
      changes     what the command line changed for all arms
      command     the command of the sweep
      collected   when the file was written, in UTC
      runs        for every run: arm, seed, status, hash of its configuration, changes, command, parameters, steps,
                  samples, metrics (METRIC_NAME for those of NAME in ``measure``), best, seconds, memory, revision,
                  machine, the weights it started from
      arms        for every arm: what it chose, if something is tuned; the size of its state, if the plan asks for it;
                  seeds, parameters, steps, samples; of every metric mean, std, min, max over the seeds

Paths are cut to their last part: results are published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tost._io import write_atomic
from tost._machine import command_arguments
from tost.errors import ConfigError
from tost.sweep.measure import read_measured
from tost.sweep.memory import state_bytes
from tost.sweep.plan import Plan
from tost.sweep.runs import Run, State, chosen_trial, state_of
from tost.train.config import config_hash
from tost.train.history import read_record, was_resumed

FORMAT = 1
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_SET_BY_SWEEP = ("train.seed", "train.init_from")

Results = dict[str, Any]

_Size = Annotated[int, Field(ge=1, lt=2**63)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    """A part of a JSON file, as far as it is used here."""

    model_config = ConfigDict(frozen=True, strict=True)


class _Summary(_Part):
    """``summary.json`` of a finished run."""

    steps: _Size
    final: dict[str, float] = {}
    best: float | None = None
    parameters: _Size | None = None
    seconds: _Number
    peak_memory_bytes: _Size | None = None
    revision: str | None = None


class _Start(_Part):
    """``start.json`` of a run: which weights, by their content; the path is private."""

    sha256: str
    loaded: int
    fresh: list[str]


class _Versions(_Part):
    torch: str | None = None
    tost: str | None = None


class _Environment(_Part):
    """``env.json`` of a run."""

    command: list[str] | None = None
    cpu: str
    threads: _Size
    device: str
    platform: str
    python: str
    versions: _Versions = _Versions()


class _Machine(_Part):
    cpu: str
    threads: _Size
    torch: str | None
    tost: str | None


class _Spread(_Part):
    mean: _Number
    std: _Number | None
    min: _Number
    max: _Number


class _StoredRun(_Part):
    arm: str
    seed: int
    status: str
    metrics: dict[str, float | None]
    revision: str | None
    machine: _Machine | None
    finished: str | None


class _StoredArm(_Part):
    seeds: list[int]
    parameters: _Size | None
    steps: _Size | None
    samples: _Size | None
    seconds: _Number | None
    metrics: dict[str, _Spread | None]
    best_metric: str | None
    best: _Spread | None
    state_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class _Stored(_Part):
    """What is read from ``results.json``."""

    plan: Plan
    command: list[str]
    collected: str
    complete: bool
    runs: list[_StoredRun]
    arms: dict[str, _StoredArm]


def collect(name: str, plan: Plan, changes: Sequence[str], runs: Sequence[Run]) -> Results:
    """Gather what the folders of all runs hold now.

    Args:
        name: Name of the plan; of a file, its last part without the suffix is kept.
        plan: The plan.
        changes: ``key=value`` texts that the command line added.
        runs: All runs of the sweep, finished or not.

    Returns:
        The content of ``results.json``.

    Raises:
        ConfigError: The ``summary.json`` of a finished run is damaged.
    """
    records = [_record(plan, run) for run in runs]
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
    size = {"state_bytes": state_bytes(next(run.settings for run in runs if run.arm == name))} if plan.states else {}
    if plan.tune is None:
        return {**size, **_aggregate(own)}
    chosen = chosen_trial(plan, name, runs)
    return {"trial": chosen, **size, **_aggregate([record for record in own if record["trial"] == chosen])}


def _record(plan: Plan, run: Run) -> dict[str, Any]:
    """Return what is known about one run; None for what is not known yet."""
    state = state_of(run)
    # A run that was started again still has the summary of its last end.
    summary = _read_summary(run.folder / "summary.json") if state is State.finished else None
    environment = _known(_Environment, run.folder / "env.json")
    measured = {
        f"{metric}_{name}": value for name, found in read_measured(plan, run).items() for metric, value in found.items()
    }
    start = _known(_Start, run.folder / "start.json")
    return {
        "arm": run.arm,
        "seed": run.seed,
        **({"trial": run.trial} if run.trial else {}),
        "status": str(state),
        "config": run.config,
        "config_hash": config_hash(run.settings),
        "changes": [_published(text) for text in run.changes if text.partition("=")[0] not in _SET_BY_SWEEP],
        "command": environment and environment.command,
        "parameters": summary and summary.parameters,
        "steps": summary and summary.steps,
        "samples": summary and summary.steps * run.settings.train.batch_size,
        "metrics": {name: _finite(value) for name, value in summary.final.items()} | measured if summary else {},
        "best": summary and _finite(summary.best),
        "best_metric": run.settings.checkpoint.best_metric,
        "seconds": summary and summary.seconds,
        "resumed": was_resumed(run.folder),
        "peak_memory_bytes": summary and summary.peak_memory_bytes,
        "revision": summary and summary.revision,
        "start": start and start.model_dump(),
        "machine": environment and _machine(environment),
        "finished": _time(run.folder / "summary.json") if summary else None,
    }


def _read_summary(path: Path) -> _Summary:
    try:
        return _Summary.model_validate(read_record(path))
    except ValidationError as error:
        raise ConfigError(
            f"{path} is damaged ({_first(error)}); remove it, and the same command goes on from the last checkpoint."
        ) from error


_Known = TypeVar("_Known", bound=_Part)


def _known(kind: type[_Known], path: Path) -> _Known | None:
    """Return a part of a run folder that results can do without; None if it is missing or damaged."""
    try:
        return kind.model_validate(read_record(path))
    except ValidationError:
        return None


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, found['loc'])) or 'the file'}: {found['msg']}"


def _time(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime(_TIME)


def _machine(environment: _Environment) -> dict[str, Any]:
    return environment.model_dump(exclude={"command", "versions"}) | environment.versions.model_dump()


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
    try:
        stored = _Stored.model_validate(results)
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged ({_first(error)}); make it again with `tost sweep`") from error
    if differing := set(stored.plan.arms) ^ set(stored.arms):
        listed = ", ".join(sorted(differing))
        raise ConfigError(
            f"{path} is damaged (arms of the plan or of the results: {listed}); make it again with `tost sweep`"
        )
    return results
