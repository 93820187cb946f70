"""The demonstration: train, generate, measure, look inside, and write it all on one page. `make demo` runs it.

python scripts/demo.py --out demo [--long]

By default models are trained for as long as fits into two and a half minutes on two
cores. Every stage is a command that can be typed as well. A run that is finished is
kept; after an interrupt the same command resumes it. Ends with the path of the page.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

INTERRUPTED = 130
PROMPTS = ("def ", "import ", "class ")
# For those who want to see the machinery and not the results.
TINY_MODEL = ("model.depth=2", "model.embed_dim=32")
TINY_IMAGES = ("train.steps=6", "train.batch_size=16", "evaluate.every=3", "schedule.warmup_steps=2", *TINY_MODEL)
SHORT_IMAGES = ("train.steps=120", "evaluate.every=60", "schedule.warmup_steps=12")
SHORT_BYTES = ("train.steps=90", "evaluate.every=30", "checkpoint.every=30", "schedule.warmup_steps=15")
TINY_BYTES = ("train.steps=6", "train.batch_size=4", "evaluate.every=3", "evaluate.batches=2", "data.options.length=64")


class Stage(NamedTuple):
    """Part of the demonstration.

    Attributes:
        title: What it does.
        command: What follows `tost`.
        run: The run folder that it makes; None for what takes no time to do again.
    """

    title: str
    command: tuple[str, ...]
    run: Path | None = None


def stages(out: Path, *, long: bool = False, tiny: bool = False) -> list[Stage]:
    """Return what is done, in order.

    Args:
        out: Folder for everything.
        long: Train for the whole length of the recipes, and measure more often.
        tiny: Take a few steps only.
    """
    digits = str(out / "data" / "digits")
    runs = {name: out / "runs" / name for name in ("digits-tost", "digits-softmax", "digits-vit", "bytes-tost")}
    images = ("train", "small/digits", f"data.path={digits}", *(TINY_IMAGES if tiny else () if long else SHORT_IMAGES))
    text = ("train", "small/stdlib_bytes", "train.steps=240", "train.batch_size=12", "schedule.warmup_steps=30")
    text += (
        "evaluate.every=60",
        "evaluate.batches=8",
        "evaluate.telemetry=true",
        "checkpoint.every=60",
        "log.every=10",
    )
    text += (*TINY_BYTES, *TINY_MODEL, "schedule.warmup_steps=2") if tiny else () if long else SHORT_BYTES
    lengths = "64,128" if tiny else "256,1024,4096"
    bench = ("bench", "ops", "--mode", "fwd", "--tokens", lengths, "--repeats", "5" if long else "3", "--quick")
    bench += ("--no-compile",)
    report = ["report", *map(str, runs.values()), "--out", str(out / "report.html")]
    report += [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    count = "40" if tiny else "200"
    write = ("--prompt", PROMPTS[0], "--temperature", "0.8", "--seed", "0", "--max-new-tokens", count)
    return [
        Stage("handwritten digits as images", ("data", "prepare", "digits", "--out", digits)),
        Stage("train ToST on the digits", _training(images, runs["digits-tost"]), runs["digits-tost"]),
        Stage(
            "the same network and size with softmax attention",
            _training((*images, "model.name=softmax_mini"), runs["digits-softmax"]),
            runs["digits-softmax"],
        ),
        Stage(
            "a plain vision transformer (ViT) of the same size",
            _training((*images, "model.name=vit_mini"), runs["digits-vit"]),
            runs["digits-vit"],
        ),
        Stage(
            "train a language model on the bytes of Python's standard library",
            _training(text, runs["bytes-tost"]),
            runs["bytes-tost"],
        ),
        Stage("let it write", ("generate", str(runs["bytes-tost"]), *write)),
        Stage("let a shipped model write, which was trained for longer", ("generate", "bytes-tiny", *write)),
        Stage("measure a ToST layer beside softmax attention", (*bench, "--out", str(out / "bench"))),
        Stage("look inside the models and write the page", tuple(report)),
    ]


def _training(command: Sequence[str], run: Path) -> tuple[str, ...]:
    return (*command, "--out", str(run), "--resume", "auto")


def is_finished(run: Path) -> bool:
    """Whether a run folder holds a run that took all its steps."""
    try:
        summary = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("status") == "finished"


def carry_out(command: Sequence[str]) -> None:
    """Run `tost` with arguments; end this program if that did not work."""
    print(f"$ {shlex.join(['tost', *command])}", flush=True)
    # A worker that waits for work spins otherwise, which on two cores takes one of them from those that have some.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    process = subprocess.Popen([sys.executable, "-m", "tost.cli", *command], env=environment)
    interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the command has got it too, and saves before it ends
            interrupted = True
    if interrupted or code == INTERRUPTED:
        print("\ninterrupted; the same command goes on from here", flush=True)
        sys.exit(INTERRUPTED)
    if code != 0:
        print(f"\nthis stage failed with exit code {code}; the message above says why.", flush=True)
        print("If it is about a run of an earlier version, remove the folder and start again.", flush=True)
        sys.exit(code)


def main() -> None:
    """Carry out all stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for everything")
    parser.add_argument("--long", action="store_true", help="train for the whole length of the recipes: ten minutes")
    parser.add_argument("--tiny", action="store_true", help="a few steps only: shows the machinery, not the results")
    options = parser.parse_args()
    began = time.monotonic()
    plan = stages(options.out, long=options.long, tiny=options.tiny)
    for number, stage in enumerate(plan, 1):
        print(f"\n=== [{number}/{len(plan)}] {stage.title} ({time.monotonic() - began:.0f} s so far)", flush=True)
        if stage.run is not None and is_finished(stage.run):
            print(f"already finished: {stage.run}", flush=True)
            continue
        command = list(stage.command)
        if command[0] == "bench":
            shutil.rmtree(options.out / "bench", ignore_errors=True)  # names of files tell the month
        if command[0] == "report":
            measured = sorted((options.out / "bench").glob("*.json"))
            command += [part for file in measured for part in ("--bench", str(file))]
        carry_out(command)
    print(f"\n=== done in {time.monotonic() - began:.0f} s; open this page in a browser:", flush=True)
    print(options.out / "report.html")


if __name__ == "__main__":
    main()
