"""Targets that people write or publish: configurations, overrides, measurements. Most of them need no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fuzz.harness import ROOT, Harness, one_file, one_of_many
from tost.errors import ConfigError

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


def bench(folder: Path) -> Harness:
    """Measurements, as the page about runs shows them."""
    from tests.report.folders import bench as ops
    from tests.report.folders import write_run
    from tost.report import read_bench, read_runs, render

    runs = read_runs([write_run(folder / "run")])

    def parse(path: Path) -> None:
        render(runs, benchmarks={path.name: read_bench(path)})

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


def explorer(folder: Path) -> Harness:
    """Requests to the explorer: the first byte chooses the address, the rest is the JSON. No answer is a failure."""
    from tests.explore.client import PORT, TOKEN, send
    from tost.explore import build_app, open_models

    app = build_app(open_models([]), token=TOKEN, port=PORT)
    paths = ("model", "text", "token", "memory", "back", "generate", "inside")
    given = {"model": "bytes-tiny", "text": "def f", "position": 1, "count": 1, "temperature": 0.5, "seed": 3}

    def parse(data: bytes) -> None:
        path = paths[data[0] % len(paths)] if data else paths[0]
        answer = send(app, f"api/{path}", data[1:], headers={"content-type": "application/json"})
        if answer.status >= 500:
            raise AssertionError(f"{path}: {answer.status} {answer.body[:200]!r}")
        if answer.status >= 400:
            raise ConfigError(answer.body.decode() or " ")

    seeds = [bytes([number]) + json.dumps(given).encode() for number in range(len(paths))]
    words = (b'"session": "x"', b"1e400", b"-1", b'"top_p": 0', b'"layer": 0', b'"ids": [1]')
    return Harness(parse, seeds, words, prefix=1)
