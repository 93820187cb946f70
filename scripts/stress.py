"""Kills a training run again and again, resumes it, and checks that nothing was lost.

    python scripts/stress.py --kills 40

A reference run goes through undisturbed. The other one is killed with SIGKILL at random moments, every second time
while a checkpoint is being written, and restarted with ``--resume auto`` until it ends. Weights, optimizer and metrics
of both must then be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RECIPE = [
    "demo/digits",
    "train.steps=800",
    "train.batch_size=16",
    "train.ema_decay=0.99",
    "checkpoint.every=5",
    "evaluate.every=100",
    "data.workers=2",
    "log.every=1",
]


def command(out: Path) -> list[str]:
    """Return the command that starts or resumes the run in a folder."""
    return [sys.executable, "-m", "tost.cli", "train", *RECIPE, "--out", str(out), "--resume", "auto"]


def newest(out: Path) -> int:
    """Return the step of the newest checkpoint."""
    steps = [int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until the condition holds; False if the process ends or the time is up before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        if condition():
            return True
        time.sleep(0.0005)
    return False


def run_and_kill(out: Path, log: Path, chance: random.Random, inside_checkpoint: bool) -> str:
    """Start or resume the run and kill it; return what happened."""
    before = newest(out)
    with log.open("ab") as stream:
        process = subprocess.Popen(command(out), stdout=stream, stderr=stream, start_new_session=True)
        checkpoints = out / "checkpoints"
        if inside_checkpoint:
            target = before + 5 * chance.randrange(4)
            wait_for(lambda: newest(out) >= target, process, 60)
            hit = wait_for(lambda: any(checkpoints.glob(".tmp-*")), process, 60)
            time.sleep(chance.random() * 0.004)
        else:
            hit = wait_for(lambda: newest(out) > before, process, 60)
            time.sleep(chance.random())
        if process.poll() is not None:
            return "ended"
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
        process.wait()
    assert process.returncode == -signal.SIGKILL, process.returncode
    unfinished = any(checkpoints.glob(".tmp-*")) if checkpoints.exists() else False
    return (
        f"killed at step >= {newest(out)}{', a checkpoint was half written' if unfinished else ''}" if hit else "killed"
    )


def losses(out: Path) -> list[tuple[int, float]]:
    """Return the recorded losses by step, of training and of evaluations."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def compare(a: Path, b: Path) -> list[str]:
    """Return what differs between two finished runs."""
    different = []
    for name in ("model.safetensors", "optimizer.safetensors", "ema.safetensors", "random-00000.json"):
        if (a / "checkpoints/last" / name).read_bytes() != (b / "checkpoints/last" / name).read_bytes():
            different.append(name)
    if losses(a) != losses(b):
        different.append("metrics.jsonl")
    return different


def main() -> int:
    """Run, kill, resume, compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/stress"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    chance, log = random.Random(arguments.seed), arguments.out / "log.txt"
    reference, victim = arguments.out / "reference", arguments.out / "victim"

    print("running undisturbed", flush=True)
    with log.open("ab") as stream:
        subprocess.run(command(reference), stdout=stream, stderr=stream, check=True)
    kills = half_written = 0
    while kills < arguments.kills:
        what = run_and_kill(victim, log, chance, inside_checkpoint=kills % 2 == 0)
        if what == "ended":
            print(f"the run ended after {kills} kills; raise train.steps to go on", flush=True)
            break
        kills += 1
        half_written += "half written" in what
        print(f"[{kills}/{arguments.kills}] {what}", flush=True)
    with log.open("ab") as stream:
        subprocess.run(command(victim), stdout=stream, stderr=stream, check=True)
    different = compare(reference, victim)
    print(f"{kills} kills, {half_written} of them inside a checkpoint")
    print(
        "DIFFERENT: " + ", ".join(different)
        if different
        else "weights, optimizer, averages and losses are equal, bit for bit"
    )
    return 1 if different or kills < arguments.kills else 0


if __name__ == "__main__":
    sys.exit(main())
