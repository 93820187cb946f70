"""Runs and what they leave behind, made by hand: nothing is trained here."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

from tost.recipes import load_config
from tost.sweep import Plan, Run, expand
from tost.train.config import RunConfig, config_hash, dump_config

DAY = 981_158_400  # 2001-02-03 at UTC
PLAN = {
    "title": "Two sizes.",
    "config": "demo/digits",
    "metric": "accuracy",
    "percent": True,
    "seeds": [0, 1],
    "set": ["train.steps=7"],
    "arms": {"thin": {"set": ["model.embed_dim=16"], "note": "narrow"}, "wide": {}},
}


@cache
def settings() -> RunConfig:
    return load_config("demo/digits")


def make_plan(**changes: object) -> Plan:
    return Plan.model_validate({**PLAN, **changes})


def make_runs(plan: Plan, out: Path, *changes: str, start: Path | None = None) -> list[Run]:
    return expand(plan, changes, out, name="mine", start=start)


def bare_run(out: Path, arm: str, after: str | None = None) -> Run:
    """A run whose settings do not matter."""
    folder = out / arm / "seed0"
    return Run(arm=arm, seed=0, config="demo/digits", changes=(), settings=settings(), folder=folder, after=after)


def mark(run: Run, status: str) -> None:
    """Write only what tells the state of a run."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.yaml").touch()
    (run.folder / "summary.json").write_text(json.dumps({"status": status}))


def leave(run: Run, status: str = "finished", *, parameters: int = 1000, log: str = "", **metrics: float) -> None:
    """Write the files that a run leaves when it ends."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.yaml").write_text(dump_config(run.settings, comments=False))
    (run.folder / "log.txt").write_text(f"said first\n{log}")
    environment = {
        "cpu": "A CPU",
        "threads": 1,
        "device": "cpu",
        "platform": "Linux",
        "python": "3.0",
        "versions": {"torch": "9.9", "tost": "0.0"},
        "command": ["tost", "train", run.config],
        "config_hash": config_hash(run.settings),
    }
    (run.folder / "env.json").write_text(json.dumps(environment))
    final = metrics or {"accuracy": 0.5}
    summary = {
        "status": status,
        "steps": run.settings.train.steps if status == "finished" else 3,
        "final": final,
        "best": final.get("accuracy", 0.0) + 0.01,
        "parameters": parameters,
        "seconds": 60.0,
        "peak_memory_bytes": 512_000_000,
        "revision": "abc1234",
    }
    (run.folder / "summary.json").write_text(json.dumps(summary))
    os.utime(run.folder / "summary.json", (DAY, DAY))
