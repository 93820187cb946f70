"""Kills, starves and damages runs of tost, and checks that nothing is lost.

    python scripts/stress                                a few of everything, minutes
    python scripts/stress --kills 1000 --minutes 60      more; results are added to those of earlier invocations
    python scripts/stress --only 'train*' stop --kills 100    some scenarios
    python scripts/stress --list

Each scenario runs a command undisturbed, then again with disturbances, and repeats the command as a user would until
it has ended. Weights, optimizer, averages, random state, metrics, data order and files must then be the same, bit for
bit. The results are stored as JSON, from which scripts/update_promises.py fills docs/promises.md.
"""

from __future__ import annotations

import os

# One thread per victim, and none in the process that they are forked from; set before anything starts some.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import argparse
import json
import random
import shutil
import sys
import time
import traceback
from fnmatch import fnmatchcase
from pathlib import Path

import commands
import hostile
import record
import training
from job import Job, Scenario
from victims import preload

SCENARIOS: dict[str, Scenario] = {**training.SCENARIOS, **commands.SCENARIOS, **hostile.SCENARIOS}
ROOT = Path(__file__).resolve().parents[2]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="in all scenarios together; at least one in each")
    parser.add_argument("--minutes", type=float, default=600.0, help="start nothing new after that")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of scenarios, or shell patterns")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios at a time")
    parser.add_argument("--seed", type=int, help="of the moments; by default other ones every time")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "stress", help="folder for the runs")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "runs" / "stress.json", help="file to add the results to"
    )
    parser.add_argument("--list", action="store_true", help="show the scenarios and stop")
    return parser.parse_args(arguments)


def shares(names: list[str], kills: int) -> dict[str, int]:
    """Distribute kills to scenarios by their shares."""
    whole = sum(SCENARIOS[name].share for name in names)
    return {name: max(1, round(kills * SCENARIOS[name].share / whole)) for name in names}


def run_scenario(name: str, folder: Path, kills: int, deadline: float, seed: int) -> None:
    """Run one scenario and leave its result in a file in its folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = Job(folder, kills, deadline, random.Random(f"{name} {seed}"))
    started = time.monotonic()
    try:
        SCENARIOS[name].run(job)
    except Exception:
        job.differences.append(traceback.format_exc())
    result = {"counts": job.counts, "differences": job.differences, "seconds": time.monotonic() - started}
    (folder / "result.json").write_text(json.dumps(result))


def start_scenario(name: str, folder: Path, kills: int, deadline: float, seed: int) -> int:
    """Run a scenario in a process of its own and return its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        run_scenario(name, folder, kills, deadline, seed)
    finally:
        os._exit(0)


def finish(name: str, folder: Path, results: Path) -> bool:
    """Store and show the result of a scenario; return whether all was right."""
    scenario = SCENARIOS[name]
    file = folder / "result.json"
    lost = {"counts": {}, "differences": ["the scenario itself was ended"], "seconds": 0.0}
    result = json.loads(file.read_text()) if file.exists() else lost
    record.add(results, name, scenario.about, scenario.counted, result)
    counts, wrong = result["counts"], result["differences"]
    print(f"{name}: {counts.get('kills', 0)} {scenario.counted} in {result['seconds']:.0f} s", flush=True)
    for text in wrong:
        print(f"  DIFFERENT: {text}\n  kept in {folder}", flush=True)
    if not wrong:
        shutil.rmtree(folder)
    return not wrong


def main() -> int:
    """Run the scenarios, store and show what came out; return the exit code."""
    options = parse()
    names = [name for name in SCENARIOS if any(fnmatchcase(name, pattern) for pattern in options.only)]
    if not names:
        print(f"no scenario matches {' '.join(options.only)}; there are: {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    if options.list:
        for name in names:
            print(f"{name:18} {SCENARIOS[name].about}")
        return 0
    preload()
    deadline = time.monotonic() + 60 * options.minutes
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    waiting, working, right = shares(names, options.kills), {}, True
    while waiting or working:
        while waiting and len(working) < options.jobs and time.monotonic() < deadline:
            name = next(iter(waiting))
            pid = start_scenario(name, options.work / name, waiting.pop(name), deadline, seed)
            working[pid] = name
        if not working:
            break
        pid, _ = os.wait()
        name = working.pop(pid)
        right &= finish(name, options.work / name, options.results)
    for line in record.table(record.load(options.results)).plain():
        print(line)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
