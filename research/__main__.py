"""python -m research: run a plan, or update the pages made from stored results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from research.pages import update
from research.plan import load_plan
from research.results import RESULTS, collect
from research.runs import execute, expand, measure
from research.tables import section
from tost.errors import TostError


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m research", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sweep = commands.add_parser("sweep", help="run a plan; the same command resumes it")
    sweep.add_argument("plan", help="name of a file in research/plans, or the path of a YAML file")
    sweep.add_argument("changes", nargs="*", help="key=value, or PATTERN:key=value for some arms")
    sweep.add_argument("--out", type=Path, help="folder (runs/PLAN)")
    sweep.add_argument("--jobs", type=int, default=1, help="runs at a time")
    sweep.add_argument("--threads", type=int, help="threads of each run (an equal share)")
    sweep.add_argument("--seeds", help="seeds, such as 0,1,2, in place of the plan's")
    sweep.add_argument("--store", action="store_true", help="copy the results of a finished sweep to research/results")
    sweep.add_argument("--dry-run", action="store_true", help="only show the commands of the runs")
    pages = commands.add_parser("pages", help="update the pages made from stored results")
    pages.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is out of date")
    options = parser.parse_args(arguments)
    try:
        return update(check=options.check) if options.command == "pages" else _sweep(options)
    except TostError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the runs have saved; the same command resumes them
        return 130


def _sweep(options: argparse.Namespace) -> int:
    plan, name = load_plan(options.plan), Path(options.plan).stem
    if options.seeds:
        plan = plan.model_copy(update={"seeds": [int(seed) for seed in options.seeds.split(",")]})
    out = options.out or Path("runs") / name
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.jobs)
    runs, failed = expand(plan, options.changes, out), []
    if options.dry_run:
        print("\n".join(shlex.join(run.arguments) for run in runs))
        return 0
    while not failed and not all(run.summary for run in runs):
        failed = execute(runs, options.jobs, threads)
        runs = expand(plan, options.changes, out)  # finished trials bring new runs
    measure(plan, runs)
    command = ["python", "-m", "research", "sweep", options.plan, *options.changes]
    results = collect(name, plan, command, runs)
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    (out / "results.json").write_text(text)
    if failed:
        return 1
    print(section(results))
    if options.store:
        (RESULTS / f"{name}.json").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
