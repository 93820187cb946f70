"""Results of a sweep: gathered from its run folders into one JSON file, and read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch.utils import _pytree as pytree

import tost
from research.plan import Plan
from research.runs import Run, chosen_trial, measured, read
from tost.errors import ConfigError
from tost.train.config import RunConfig

__all__ = ["RESULTS", "Results", "collect", "is_committed", "read_results", "state_bytes"]

RESULTS = Path(__file__).parent / "results"
FORMAT = 1
Results = dict[str, Any]


def collect(name: str, plan: Plan, command: Sequence[str], runs: Sequence[Run]) -> Results:
    """Return the results of all runs, finished or not.

    Absolute paths in the command are cut to their last part: results are published.
    """
    records = [_record(plan, run) for run in runs]
    return {
        "format": FORMAT,
        "name": name,
        "plan": plan.model_dump(mode="json", exclude_defaults=True),
        "command": [_published(word) for word in command],
        "complete": all(record["status"] == "finished" for record in records),
        "runs": records,
        "arms": {arm: _arm(plan, arm, runs, records) for arm in plan.arms},
    }


def _published(word: str) -> str:
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if Path(value).is_absolute() else word


def _record(plan: Plan, run: Run) -> dict[str, Any]:
    summary, environment = run.summary, read(run.folder / "env.json")
    machine = {key: environment.get(key) for key in ("cpu", "threads")} | environment.get("versions", {})
    path = run.folder / "summary.json"
    return {
        "arm": run.arm,
        "seed": run.seed,
        "trial": run.trial or None,
        "status": "finished" if summary else "unfinished",
        "config": run.config,
        "changes": [_published(change) for change in run.changes],
        "parameters": summary.get("parameters"),
        "steps": summary.get("steps"),
        "samples": summary["steps"] * run.settings.train.batch_size if summary else None,
        "metrics": {**summary["final"], **measured(plan, run)} if summary else {},
        "best": summary.get("best"),
        "best_metric": run.settings.checkpoint.best_metric,
        "seconds": summary.get("seconds"),
        "revision": summary.get("revision"),
        "machine": {key: machine.get(key) for key in ("cpu", "threads", "torch", "tost")},
        "finished": datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d") if summary else None,
    }


def _arm(plan: Plan, name: str, runs: Sequence[Run], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    done = [record for record in records if record["arm"] == name and record["status"] == "finished"]
    found: dict[str, Any] = {}
    if plan.tune:
        found["trial"] = chosen_trial(plan, name, runs)
        done = [record for record in done if record["trial"] == found["trial"]]
    if plan.states:
        found["state_bytes"] = state_bytes(next(run.settings for run in runs if run.arm == name))
    names = dict.fromkeys(metric for record in done for metric in record["metrics"])
    kept = {record["best_metric"] for record in done} == {plan.metric}
    return {
        **found,
        "seeds": [record["seed"] for record in done],
        **{key: done[0][key] if done else None for key in ("parameters", "steps", "samples", "best_metric")},
        "seconds": fmean(record["seconds"] for record in done) if done else None,
        "metrics": {metric: _spread([record["metrics"].get(metric) for record in done]) for metric in names},
        "best": _spread([record["best"] for record in done]) if kept else None,
    }


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": fmean(known), "std": stdev(known) if len(known) > 1 else None, "min": min(known), "max": max(known)}


def state_bytes(settings: RunConfig) -> int | None:
    """Return the bytes that the mixers of a language model keep after one sample; None if they have no state.

    Windows of convolutions and counts of tokens, which do not depend on the mixer, are left out.
    """
    with torch.device("meta"):
        model: Any = tost.create_model(settings.model.name, **settings.model.options)
        ids = torch.zeros(1, settings.data.shape().length or 1, dtype=torch.int64)
    try:
        _, state = model.forward_with_state(ids)
    except ConfigError:
        return None
    layers = [getattr(layer, "mixer", layer) for layer in state.layers]
    numbers = [x for x in pytree.tree_leaves(layers) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(x.numel() * x.element_size() for x in numbers)


def read_results(name: str | Path) -> Results:
    """Read stored results, by name or path.

    Raises:
        ConfigError: The file does not hold the results of a finished sweep.
    """
    path = RESULTS / f"{name}.json" if isinstance(name, str) else name
    results = json.loads(path.read_text(encoding="utf-8"))
    if results.get("format") != FORMAT or not results.get("complete"):
        raise ConfigError(f"{path} does not hold the results of a finished sweep in format {FORMAT}")
    for arm in results["plan"]["arms"].values():
        arm.pop("after", None)  # an option of earlier plans
    return results


def is_committed(results: Results, arm: str) -> bool:
    """Return whether all runs behind the numbers of an arm are of a committed revision."""
    trial = results["arms"][arm].get("trial")
    runs = [run for run in results["runs"] if run["arm"] == arm and trial in (None, run.get("trial"))]
    return all(run["revision"] and not run["revision"].endswith("-dirty") for run in runs)
