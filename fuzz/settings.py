"""Targets that people write or publish: configurations, overrides, sweeps, measurements. Most of them need no torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.harness import ROOT, Harness, one_file, one_of_many

SMALL = (
    "recipe: classification\nmodel: {name: tost_sequence, embed_dim: 16, depth: 1, num_heads: 2}\n"
    "data: {name: digits}\n"
    "train: {steps: 7, batch_size: 4}\noptim: {lr: 1e-3}\n"
)
FORMS = (
    "recipe: language_modeling\nmodel:\n  name: tost_lm_base\n  embed_dim: 64\n  layer_scale: 1e-5\n"
    "data: {name: stdlib_bytes, options: {length: 32}}\noptim: {betas: [0.9, 0.95]}\n",
    "a: &x [1, .inf, ~, 'q', \"\\u0041\"]\nb: *x\nc: !!python/name:os.system {}\n? d\n: |\n  text\n",
)
PLAN = """title: Two sizes.
config: demo/digits
metric: accuracy
percent: true
seeds: [0, 1]
set: [train.steps=7]
source: a table
levels: {majority: 10.0}
arms:
  thin: {set: [model.embed_dim=16], note: narrow, reference: 91.2}
  wide: {after: thin, seeds: [0]}
"""
TASKS = """title: Tasks.
config: demo/listops
metric: accuracy
tasks: {text: {chance: 50}, image: {chance: 10, extra: true}}
arms: {text_tost: {}, image_tost: {}}
"""


def config(folder: Path) -> Harness:
    """Configuration files."""
    from tost.recipes import load_config
    from tost.train.config import dump_config

    full = dump_config(load_config("demo/digits"), comments=False)
    words = [f"{line.strip()}\n" for line in full.splitlines()]
    needed = {line.partition(":")[0]: line for line in SMALL.splitlines(keepends=True)}
    parts = re.findall(r"^(\w+):\n((?: .*\n)+)", full, flags=re.MULTILINE)
    each = ["".join({**needed, name: f"{name}:\n{lines}"}.values()) for name, lines in parts]  # whole, it takes long
    seeds = [text.encode() for text in (SMALL, *FORMS, *each)]
    return one_file(folder / "mine.yaml", lambda path: load_config(str(path)), seeds, words)


def overrides(folder: Path) -> Harness:
    """Overrides on the command line, one per line."""
    from tost.recipes import load_config

    base = folder / "base.yaml"
    base.write_text(SMALL)
    seeds = (
        "train.steps=100\nmodel.depth=2\noptim.lr=1e-3",
        "data.name=listops\nmodel.name=lra_listops\nmodel.mixer=softmax",
        "optim.betas=[0.9, 0.99]\ntrain.clip_norm=null\ncheckpoint.best_metric='accuracy'",
        "data.options.length=64\nmodel.name=my.module:Class\nlog.every=true",
    )

    def parse(data: bytes) -> None:
        # As the system hands arguments over: bytes that are no UTF-8 become surrogates, and there is no zero.
        load_config(str(base), data.replace(b"\0", b"").decode("utf-8", "surrogateescape").split("\n"))

    words = ("model.", "data.options.", "train.", "optim.", "schedule.", "evaluate.", "=", "[1, 2]", "{a: 1}", "&a ")
    return Harness(parse, [seed.encode() for seed in seeds], [word.encode() for word in words])


def sweep_plan(folder: Path) -> Harness:
    """Plans of sweeps, and the runs that they mean."""
    from tost.sweep import expand, load_plan

    def parse(path: Path) -> None:
        plan = load_plan(str(path))
        if len(plan.arms) * len(plan.seeds) <= 4:  # each takes a configuration to be read
            expand(plan, [], folder / "out", name="mine")

    words = ("after: ", "seeds: ", "set: [", "reference: ", "arms:\n", "tasks:\n", "levels:\n", "config: ")
    return one_file(folder / "plan.yaml", parse, [PLAN.encode(), TASKS.encode()], words)


def sweep_results(folder: Path) -> Harness:
    """Stored results of sweeps, as tables and text are made from them."""
    from scripts.results_page import section

    from tost.sweep import read_results

    def parse(path: Path) -> None:
        section(read_results(path), "Reached: {thin.accuracy.mean:.1f}.")

    return one_file(folder / "results.json", parse, [_results(folder, PLAN), _results(folder, TASKS)])


def _results(folder: Path, plan: str) -> bytes:
    from tests.sweep.samples import leave
    from tost.sweep import collect, expand, load_plan, write_results

    file, out, stored = folder / "seed.yaml", folder / "seed-runs", folder / "seed.json"
    file.write_text(plan)
    loaded = load_plan(str(file))
    runs = expand(loaded, [], out, name="seed")
    for run in runs:
        leave(run)
    write_results(stored, collect("seed", loaded, [], runs))
    return stored.read_bytes()


def sweep_folder(folder: Path) -> Harness:
    """Run folders, as a sweep reads them to go on and to gather results."""
    from scripts.results_page import section

    from tests.sweep.samples import leave
    from tost.sweep import check_folders, collect, expand, load_plan, metric_problem, unfinished
    from tost.sweep.runner import progress_of

    file, out = folder / "plan.yaml", folder / "out"
    file.write_text(PLAN.replace("seeds: [0, 1]", "seeds: [0]"))
    plan = load_plan(str(file))
    runs = expand(plan, [], out, name="plan")
    for run in runs:
        leave(run)
    first = runs[0].folder
    (first / "metrics.jsonl").write_text('{"kind": "step", "step": 3, "loss": 0.5, "eta_seconds": 1.5}\n')
    (first / "start.json").write_text('{"path": "x", "sha256": "00", "loaded": 3, "fresh": ["head.weight"]}\n')

    def parse(_: Path) -> None:
        progress_of(runs[0])
        unfinished(runs, runs)
        results = collect("plan", plan, [], runs)
        if not metric_problem(results):
            section(json.loads(json.dumps(results, allow_nan=False)))
        check_folders(runs)

    names = ("summary.json", "env.json", "start.json", "metrics.jsonl", "log.txt", "config.yaml")
    return one_of_many(first, names, parse)


@dataclass
class Numbers:
    """What a benchmark measured."""

    rows: list[dict[str, Any]] = field(default_factory=list)


def bench(folder: Path) -> Harness:
    """Measurements, as the page about runs shows them and as the benchmarks read them back."""
    from tests.report.folders import bench as ops
    from tests.report.folders import write_run
    from tost.bench.harness.report import Report
    from tost.report import read_bench, read_runs, render

    runs = read_runs([write_run(folder / "run")])

    def parse(path: Path) -> None:
        render(runs, benchmarks={path.name: read_bench(path)})
        Report.from_json(json.loads(path.read_bytes()), Numbers)

    stored = (ROOT / "benchmarks" / "results").glob("*.json")
    seeds = [json.dumps(ops()).encode(), *(path.read_bytes() for path in stored if path.stat().st_size < 20_000)]
    return one_file(folder / "bench.json", parse, seeds, ("rows", "gate", "passed", "attention", "ops"))


def report(folder: Path) -> Harness:
    """Run folders, as the page about runs shows them."""
    from tests.report.folders import write_run
    from tost.report import read_runs, render

    run = write_run(folder / "run", steps=10)
    names = ("config.yaml", "env.json", "metrics.jsonl", "summary.json")
    return one_of_many(run, names, lambda _: render(read_runs([run])))
