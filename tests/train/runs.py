"""Tiny real runs for the tests of the loop: in this process, or through the command line in others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.processes import run_ranks, run_tost
from tost.recipes import get_task, load_config
from tost.train.loop import RunResult, fit

TINY = (
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "model.dropout=0.1",
    "train.steps=12",
    "train.batch_size=8",
    "train.precision=fp32",
    "checkpoint.every=4",
    "evaluate.every=6",
    "evaluate.batches=3",
    "log.every=1",
    "optim.lr=1e-3",
    "schedule.warmup_steps=2",
)


class Recorder:
    """Keeps what a run says, and asks it to stop after a given step as Ctrl-C or a scheduler would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.messages: list[str] = []
        self.losses: dict[int, float] = {}
        self.evaluations: dict[int, dict[str, float]] = {}

    def message(self, text):
        self.messages.append(text)

    def step(self, record):
        self.losses[record.step] = record.loss
        if record.step == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluation(self, step, metrics):
        self.evaluations[step] = dict(metrics)


def run(
    out: Path, *overrides: str, config="demo/digits", resume=None, stop_after=None, accept_data_change=False
) -> tuple[RunResult, Recorder]:
    """Run in this process."""
    settings = load_config(config, [*TINY, *overrides])
    recorder = Recorder(stop_after)
    task = get_task(settings.recipe)
    flags = {"reporter": recorder, "accept_data_change": accept_data_change}
    return fit(settings, task, out, resume=resume, **flags), recorder


def command(out: Path, *arguments: str, config: str = "demo/digits") -> subprocess.CompletedProcess[str]:
    """Run ``tost train`` in a process of its own, or with ``--nproc`` in several that it starts."""
    line = ("train", config, *TINY, *arguments, "--out", str(out))
    return run_tost(*line, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")


def two_ranks(out: Path, *arguments: str, config: str = "demo/digits") -> subprocess.CompletedProcess[str]:
    """Run ``tost train`` as two processes of one run, without a launcher; return the first."""
    return run_ranks("train", config, *TINY, *arguments, "--out", str(out))[0]


def records(out: Path) -> list[dict[str, float]]:
    """What metrics.jsonl says that does not depend on the clock."""
    timed = {"tokens_per_second", "seconds_per_step", "mfu", "memory_bytes", "eta_seconds"}
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]


def assert_same_run(a: Path, b: Path, processes: int = 1) -> None:
    """Weights, optimizer, averages, random numbers and metrics are equal, bit for bit."""
    last = [folder / "checkpoints" / "last" for folder in (a, b)]
    names = sorted(path.name for path in last[0].iterdir() if path.name != "manifest.json")
    assert names == sorted(path.name for path in last[1].iterdir() if path.name != "manifest.json")
    assert len([name for name in names if name.startswith("random-")]) == processes
    for name in names:
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    assert records(a) == records(b)
