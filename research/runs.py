"""Runs of a plan: settings, processes and run folders."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from research.plan import Plan
from tost.errors import ConfigError
from tost.recipes import load_config
from tost.train.config import RunConfig

__all__ = ["Run", "chosen_trial", "execute", "expand", "measure", "measured", "read"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed, and one value of the tuned key if the plan has one."""

    arm: str
    seed: int
    trial: str
    config: str
    changes: tuple[str, ...]
    settings: RunConfig
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json`` of the finished run; empty before."""
        found = read(self.folder / "summary.json")
        return found if found.get("status") == "finished" else {}

    @property
    def arguments(self) -> list[str]:
        """Command line that carries the run out, or resumes it."""
        seed = f"train.seed={self.seed}"
        return ["tost", "train", self.config, *self.changes, seed, "--out", str(self.folder), "--resume", "auto"]


def read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def expand(plan: Plan, changes: Sequence[str], out: Path) -> list[Run]:
    """Return the runs of a plan, the first seed of all arms first.

    Where the plan tunes a key, runs with other seeds appear once all trials of their arm have finished.

    Args:
        plan: The plan.
        changes: ``key=value`` texts for all arms, or ``PATTERN:key=value`` for those that match a shell pattern.
        out: Folder of the sweep.

    Raises:
        ConfigError: A configuration or a change is wrong.
    """
    runs = []
    for arm in plan.arms:
        given = _changes(plan, arm, changes)
        if plan.equal is not None and plan.equal_arm(arm) != arm:
            like = str(plan.equal_arm(arm))
            given.append(_equal_width(_load(plan, arm, given), _load(plan, like, _changes(plan, like, changes))))
        trials = [f"{plan.tune.key}={value:g}" for value in plan.tune.values] if plan.tune else [""]
        for place, seed in enumerate(plan.seeds_of(arm)):
            if place and plan.tune:
                best = chosen_trial(plan, arm, runs)
                trials = [best] if best else []
            for trial in trials:
                own = [*given, *filter(None, [trial])]
                runs.append(
                    Run(
                        arm=arm,
                        seed=seed,
                        trial=trial,
                        config=_config(plan, arm),
                        changes=tuple(own),
                        settings=_load(plan, arm, own),
                        folder=out / arm / trial / f"seed{seed}",
                    )
                )
    return sorted(runs, key=lambda run: plan.seeds.index(run.seed))


def chosen_trial(plan: Plan, arm: str, runs: Sequence[Run]) -> str | None:
    """Return the trial with which an arm did best; None until all of them have finished."""
    trials = [run for run in runs if run.arm == arm and run.seed == plan.seeds_of(arm)[0]]
    if not all(run.summary for run in trials):
        return None
    worst = math.inf if plan.mode == "min" else -math.inf
    best = min if plan.mode == "min" else max
    return best(trials, key=lambda run: run.summary["final"].get(plan.metric, worst)).trial


def _config(plan: Plan, arm: str) -> str:
    task = plan.tasks.get(plan.task_of(arm)[0])
    return plan.arms[arm].config or (task and task.config) or plan.config


def _changes(plan: Plan, arm: str, changes: Sequence[str]) -> list[str]:
    """Return the changes of the plan, of the task, of the arm and of the command line, in this order."""
    task = plan.tasks.get(plan.task_of(arm)[0])
    given = [*plan.set, *(task.set if task else []), *plan.arms[arm].set]
    for change in changes:
        pattern, colon, _ = change.partition("=")[0].rpartition(":")
        if not colon or fnmatchcase(arm, pattern):
            given.append(change.removeprefix(f"{pattern}:") if colon else change)
    return given


def _load(plan: Plan, arm: str, changes: Sequence[str]) -> RunConfig:
    try:
        return load_config(_config(plan, arm), changes)
    except ConfigError as error:
        raise ConfigError(f"arm {arm}: {error}") from None


def _equal_width(settings: RunConfig, like: RunConfig) -> str:
    """Return the ``model.mlp_ratio`` that gives one model about as many parameters as another."""
    wanted = _parameters(like)
    one, two = (_parameters(settings, mlp_ratio=float(ratio)) for ratio in (1, 2))
    width = settings.model.options["embed_dim"]
    hidden = width + round((wanted - one) / ((two - one) / width))
    if hidden < 1:
        raise ConfigError(f"without MLPs it still has more than the {wanted:,} parameters that the plan asks for")
    return f"model.mlp_ratio={hidden / width!r}"


def _parameters(settings: RunConfig, **changes: Any) -> int:
    import torch

    import tost

    with torch.device("meta"):
        model = tost.create_model(settings.model.name, **{**settings.model.options, **changes})
    return sum(p.numel() for p in model.parameters())


def execute(runs: Sequence[Run], jobs: int, threads: int) -> list[Run]:
    """Carry out runs that have not finished; return those that failed.

    Each is a process. Ctrl-C reaches all of them: they save, and the same command resumes them.
    """
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": str(threads)}

    def carry_out(run: Run) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        with (run.folder / "output.txt").open("ab") as output:
            command = [sys.executable, "-m", "tost.cli", *run.arguments[1:]]
            subprocess.run(command, stdout=output, stderr=output, env=environment, check=False)
        print(f"{run.folder}: {'finished' if run.summary else 'failed, see output.txt there'}", flush=True)

    waiting = [run for run in runs if not run.summary]
    pool = ThreadPoolExecutor(jobs)
    try:
        list(pool.map(carry_out, waiting))
    finally:
        pool.shutdown(cancel_futures=True)
    return [run for run in waiting if not run.summary]


def measure(plan: Plan, runs: Sequence[Run]) -> None:
    """Evaluate finished runs again with the changes of ``measure``, once; results go into their folders."""
    for run in runs:
        if run.summary and run.trial in ("", chosen_trial(plan, run.arm, runs)):
            stored = read(run.folder / "measured.json")
            for name, changes in plan.measure.items():
                if stored.get(name, {}).get("changes") != changes:
                    command = [sys.executable, "-m", "tost.cli", "eval", str(run.folder), *changes, "--json"]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    found = json.loads(done.stdout.splitlines()[-1])
                    metrics = {key: value for key, value in found.items() if isinstance(value, float)}
                    stored[name] = {"changes": changes, "metrics": metrics}
            (run.folder / "measured.json").write_text(json.dumps(stored))


def measured(plan: Plan, run: Run) -> dict[str, float]:
    """Return the metrics that `measure` stored, as ``METRIC_NAME``."""
    stored = read(run.folder / "measured.json")
    entries = {name: stored[name] for name in plan.measure if name in stored}
    return {f"{key}_{name}": value for name, entry in entries.items() for key, value in entry["metrics"].items()}
