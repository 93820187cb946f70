"""Train the models in the box, and put them into the package with their cards.

python scripts/train_pretrained.py --out pretrained_runs

Every stage is a command that can be typed as well. A finished run is kept, an interrupted one goes on. Weights are
rounded to half precision; the results on the cards are measured after that.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tost._io import sha256_of, write_atomic, write_json
from tost._text import count
from tost.data import build_data
from tost.data.images.options import ImageOptions
from tost.pretrained import FILE, INDEX, WEIGHTS
from tost.recipes import load_config
from tost.train.checkpoint.model import load_model, save_model
from tost.train.config import RunConfig

SAMPLES = 10
"""Images of the validation set that come with a classifier, to try it on."""


class Entry(NamedTuple):
    """A model to train.

    Attributes:
        description: One line for lists.
        data: What it was trained on, and the licence of that.
        use: Lines of Python that show what it is for.
        limits: What not to expect of it.
        prepare: What `tost data prepare` has to make before; empty for nothing.
    """

    description: str
    data: str
    use: str
    limits: str
    prepare: str = ""


_SOURCES = "The sources of the Python standard library, as bytes. They are under the PSF licence (version 2)."
_WRITER = "It has read a few megabytes of Python for a few minutes: it knows the look of code, not what code means."
_GENERATE = """\
model = tost.load_pretrained("{}")
prompt = torch.tensor([list(b"def main(")])
print(bytes(tost.generate(model, prompt, max_new_tokens=200, temperature=0.7)[0].tolist()).decode(errors="replace"))"""
_CLASSIFY = """\
import tost.integrations.timm, timm
model = timm.create_model("tost_mini", pretrained=True).eval()  # or tost.load_pretrained("digits-tiny")
print(model(torch.zeros(1, 3, 32, 32)).softmax(-1))"""

ENTRIES = {
    "bytes-tiny": Entry(
        "ToST language model over bytes, no limit on the length", _SOURCES, _GENERATE.format("bytes-tiny"), _WRITER
    ),
    "bytes-gpt-tiny": Entry(
        "GPT over bytes, as large as bytes-tiny and trained on the same text, to compare with",
        _SOURCES,
        _GENERATE.format("bytes-gpt-tiny"),
        f"{_WRITER} It was trained on windows of 512 bytes and gets worse after that.",
    ),
    "digits-tiny": Entry(
        "ToST image classifier, handwritten digits of 32 x 32 pixels",
        "The handwritten digits that come with scikit-learn, 8 x 8 pixels each, from the UCI Machine Learning "
        "Repository (E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits), under CC BY 4.0.",
        _CLASSIFY,
        "It sees digits in everything. White strokes on black are what it knows.",
        "digits",
    ),
}


def run(*command: str, quiet: bool = False) -> str:
    """Run `tost` with arguments; return its output, or show it."""
    print(f"$ {shlex.join(['tost', *command])}", flush=True)
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    program = [sys.executable, "-m", "tost.cli", *command]
    done = subprocess.run(program, env=environment, check=True, text=True, stdout=subprocess.PIPE if quiet else None)
    return done.stdout or ""


def train(name: str, out: Path) -> Path:
    """Train a model unless that is done; return the run folder."""
    folder, given, prepare = out / name, [], ENTRIES[name].prepare
    if (folder / "summary.json").is_file() and json.loads((folder / "summary.json").read_text())[
        "status"
    ] == "finished":
        return folder
    if prepare:
        run("data", "prepare", prepare, "--out", str(out / prepare))
        given = [f"data.path={out / prepare}"]
    run("train", f"pretrained/{name}", *given, "--out", str(folder), "--resume", "auto")
    return folder


def pack(name: str, folder: Path) -> dict[str, Any]:
    """Put the model of a run into the package; return its entry in the index."""
    config, target = load_config(str(folder / "config.yaml")), WEIGHTS / name
    best = folder / "checkpoints" / "best"
    model = load_model(best if best.exists() else folder).half()
    shutil.rmtree(target, ignore_errors=True)
    save_model(model, target, name=config.model.name)
    given = [f"data.path={config.data.path}"] if config.data.path else []
    command = ("eval", f"pretrained/{name}", *given, f"train.init_from={target}", "--json")
    metrics = json.loads(run(*command, quiet=True).splitlines()[-1])
    kept = ("accuracy",) if "accuracy" in metrics else ("loss", "bits_per_token")
    entry = {
        "description": describe(name, config, folder),
        "config": f"pretrained/{name}",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "results": {metric: round(metrics[metric], 4) for metric in kept if metric in metrics},
        "image": add_samples(config, target),
        "sha256": sha256_of(target / FILE),
    }
    write_atomic(target / "README.md", card(name, config, entry, folder))
    return entry


def describe(name: str, config: RunConfig, folder: Path) -> str:
    """Return the line for lists; it says so if the run was packed before it was finished."""
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    unfinished = "" if steps == config.train.steps else f"; UNFINISHED, {steps} of {config.train.steps} steps"
    return f"{ENTRIES[name].description}{unfinished}"


def add_samples(config: RunConfig, target: Path) -> dict[str, Any]:
    """Write an image of each class beside a classifier, and return how it takes images; nothing for other models."""
    options = config.data.data_set_options()
    if not isinstance(options, ImageOptions):
        return {}
    files = sorted(Path(str(config.data.path)).glob("val/*/*.png"))
    classes = sorted({file.parent.name for file in files})
    (target / "samples").mkdir()
    for label in classes[:SAMPLES]:
        first = next(file for file in files if file.parent.name == label)
        shutil.copyfile(first, target / "samples" / f"{label}.png")
    return {
        "image_size": list(options.size),
        "mean": list(options.mean),
        "std": list(options.std),
        "classes": classes,
    }


def card(name: str, config: RunConfig, entry: dict[str, Any], folder: Path) -> str:
    """Return the model card of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    environment = json.loads((folder / "env.json").read_text())
    info = build_data(config.data, config.train.seed).info
    about, path = ENTRIES[name], " data.path=DIR" if config.data.path else ""
    details = "; ".join(f"{key} {value}" for key, value in info.details.items())
    facts = {
        "parameters": f"{entry['parameters']:,}, stored in half precision",
        "data": f"{about.data} {details}; fingerprint `{info.fingerprint[:16]}`".strip(),
        "training": f"{summary['steps']:,} of {config.train.steps:,} steps, {config.train.batch_size} at a time; "
        f"seed {config.train.seed}; {summary['seconds'] / 60:.1f} minutes on {environment['cpu']}, "
        f"{count(environment['threads'], 'thread')}",
        "result on the validation set": ", ".join(f"{metric} {value}" for metric, value in entry["results"].items()),
        "versions": f"torch {torch.__version__}, revision `{environment['revision']}`",
        "SHA-256 of the weights": f"`{entry['sha256']}`",
        "licence": "MIT, as the package",
    }
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return (
        f"# {name}\n\n{entry['description']}.\n\n| | |\n|---|---|\n{rows}\n\n"
        f"## Use\n\n```python\nimport torch, tost\n\n"
        f"{about.use}\n```\n\n{about.limits}\n\n## Make it again\n\n```console\n"
        f"$ tost train pretrained/{name}{path} --out RUN\n"
        f"$ python scripts/train_pretrained.py --out RUNS {name}\n```\n\n"
        "Written by `scripts/train_pretrained.py`.\n"
    )


def main() -> None:
    """Train and pack the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(ENTRIES)}; all by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and their data")
    parser.add_argument("--no-train", action="store_true", help="pack the runs as they are, finished or not")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ENTRIES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ENTRIES)}")
    index = json.loads((WEIGHTS / INDEX).read_text()) if (WEIGHTS / INDEX).is_file() else {}
    for name in given.names or ENTRIES:
        index[name] = pack(name, given.out / name if given.no_train else train(name, given.out))
        write_json(WEIGHTS / INDEX, index)
    size = sum(file.stat().st_size for file in WEIGHTS.rglob("*") if file.is_file())
    print(f"{WEIGHTS}: {len(index)} models, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
