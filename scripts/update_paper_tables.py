"""Makes docs/paper-tables.md: what the paper prints, the commands for it, and what was measured here.

python scripts/update_paper_tables.py           rewrite docs/paper-tables.md
python scripts/update_paper_tables.py --check   only say whether it is up to date; exit code 1 if not

The paper's numbers and our commands stand in scripts/paper_tables.yaml. Our numbers come from the models, from
stored sweeps (results/*.json) and from the newest stored measurement (benchmarks/results/ops_*.json); whatever is
not stored is said to be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from page_file import MEASUREMENTS, ROOT, newest, update_page

import tost
from tost._text import Table
from tost.errors import ConfigError
from tost.models import model_options
from tost.recipes import load_config
from tost.sweep import load_plan, read_results, table

__all__ = ["entries", "generate", "main", "measurement", "section"]

SOURCE = ROOT / "scripts" / "paper_tables.yaml"
PAGE = ROOT / "docs" / "paper-tables.md"
RESULTS = ROOT / "results"
INTRODUCTION = """# The paper's tables and ours

Every table and figure of the paper that holds a result: its numbers, the commands that reproduce it, and what was
measured here. Most of it takes machines that this project has not; where that is so, the page says what it needs, and
shows the same kind of experiment at a size for one core if there is one. [Results](results.md) says more about those,
[From equations to code](equations.md) what computes what.

This page is made by `scripts/update_paper_tables.py`. The paper's numbers are those of its text
([arXiv:2412.17810](https://arxiv.org/abs/2412.17810)), ours come from models and stored results. Tables and figures are
counted in the order of that text."""
SHAPES = {"heads K": "num_heads", "layers L": "depth", "width d": "embed_dim"}


def entries() -> list[dict[str, Any]]:
    """Return what the paper prints, in order."""
    # Everything stays text, so that a number is shown with the digits that the paper prints.
    found: list[dict[str, Any]] = yaml.load(SOURCE.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    return found


def measurement(theme: str, folder: Path = MEASUREMENTS) -> dict[str, Any] | None:
    """Return what the newest measurement of a theme holds, or None."""
    path = newest(theme, folder)
    return None if path is None else json.loads(path.read_text())


def section(entry: Mapping[str, Any], results: Path = RESULTS, measurements: Path = MEASUREMENTS) -> str:
    """Return the part of the page about one table or figure.

    Args:
        entry: One of `entries`.
        results: Where sweeps are stored.
        measurements: Where measurements of speed are stored.
    """
    parts = [f"## {entry['name']}: {entry['title']}"]
    if "rows" in entry:
        rows = {row[0]: row[1:] for row in entry["rows"]}
        ours = _ours(entry)
        parts.append(_table(entry["columns"], [[label, *cells] for label, cells in _beside(rows, ours)]).markdown())
        parts += [_agreement(rows, ours)] if ours else []
    parts += [entry[key].strip() for key in ("text", "note") if key in entry]
    parts.append("\n".join(["```shell", *entry["commands"], "```"]))
    parts += _small_experiments(entry, results)
    parts += _efficiency(entry, measurement("ops", measurements), measurement("attention", measurements))
    steps = measurement("generate", measurements) if "steps" in entry else None
    parts += _steps(entry["steps"], steps) if steps else []
    return "\n\n".join(parts)


def _ours(entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """Rows that are computed here, from the models or configurations that stand for the paper's columns."""
    if "configs" in entry:
        return _schedules(entry["configs"])
    names = entry.get("models", [])
    if not entry.get("shapes"):
        return {"parameters": [_parameters(name) for name in names]} if names else {}
    options = [model_options(name, {}).model_dump() for name in names]
    rows = {label: [str(found[key]) for found in options] for label, key in SHAPES.items()}
    return rows | {"head width p": [str(found["embed_dim"] // found["num_heads"]) for found in options]}


def _parameters(name: str) -> str:
    with torch.device("meta"):
        return f"{tost.create_model(name).num_parameters() / 1e6:.1f}M"


def _schedules(names: Sequence[str]) -> dict[str, list[str]]:
    configs = [load_config(name, ["data.path=DIR"]) for name in names]
    models = [config.model.options for config in configs]
    return {
        "layers L": [str(model["depth"]) for model in models],
        "width d": [str(model["embed_dim"]) for model in models],
        "heads K": [str(model["num_heads"]) for model in models],
        "MLP": [f"{model['embed_dim'] * model['mlp_ratio']:.0f}" for model in models],
        "batch": [str(config.train.batch_size) for config in configs],
        "learning rate": [f"{config.optim.lr:g}" for config in configs],
        "dropout": [f"{model['dropout']:g}" for model in models],
        "weight decay": [f"{config.optim.weight_decay:g}" for config in configs],
        "iterations": [str(config.train.steps) for config in configs],
        "warm-up": [str(config.schedule.warmup_steps) for config in configs],
        "decay": [str(config.schedule.name).replace("_", " ") for config in configs],
    }


def _same(paper: str, ours: str) -> bool:
    """Tell whether two cells say the same: equal numbers, or ours rounds to the paper's."""
    if paper == ours:
        return True
    try:
        values = [float(text.removesuffix("M")) for text in (paper, ours)]
    except ValueError:
        return False
    digits = len(paper.removesuffix("M").partition(".")[2])
    return values[0] == values[1] or (paper.endswith("M") and round(values[1], digits) == values[0])


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, labels: int = 1) -> Table:
    return Table(headers=tuple(headers), rows=tuple(map(tuple, rows)), labels=labels)


def _beside(paper: Mapping[str, list[str]], ours: Mapping[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    for label, cells in paper.items():
        yield label, cells
        if label in ours and not all(map(_same, cells, ours[label])):
            yield f"{label}, here", ours[label]


def _agreement(paper: Mapping[str, list[str]], ours: Mapping[str, list[str]]) -> str:
    """Say which rows were compared with our models, and with which outcome."""
    other = [label for label, cells in ours.items() if not all(map(_same, paper[label], cells))]
    same = [label for label in ours if label not in other]
    told = [f"Compared with what is built here, and the same: {', '.join(same)}."] if same else []
    return " ".join([*told, *([f"Not the same: {', '.join(other)}."] if other else [])])


def _small_experiments(entry: Mapping[str, Any], folder: Path) -> list[str]:
    parts = [f"**Not run here**: needs {entry['needs'].strip()}."] if "needs" in entry else []
    missing = []
    for name in entry.get("sweeps", []):
        path = folder / f"{name}.json"
        if not path.exists():
            missing.append(f"`tost sweep {name}`")
            continue
        results = read_results(path)
        title = load_plan(name).title.removesuffix(".")
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        parts.append(f"**Measured here**: [{title}](results.md#{anchor}).")
        parts.append(table(results).markdown())
    if missing:
        parts.append(f"Ready to run, without a stored result: {', '.join(missing)}.")
    return parts


def _efficiency(entry: Mapping[str, Any], ops: Mapping[str, Any] | None, full: Mapping[str, Any] | None) -> list[str]:
    """Return what was measured of a figure or of growth; nothing if no measurement is stored."""
    if "growth" in entry:
        return _growth(entry["growth"], ops) if ops else []
    if "figures" not in entry or full is None:
        return []
    parts = [f"**Measured here**, {_machine(full)}. [Efficiency](efficiency.md) says how it is measured."]
    if "relative" in entry:
        return [*parts, *_relative(entry["figures"], entry["relative"], full)]
    for figure in entry["figures"]:
        parts += _figure(figure, full)
    return parts + (_in_turns(full) if "tokens" in entry["figures"] else [])


def _points(figure: str, measured: Mapping[str, Any]) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Return the forward rows of a figure by their place on its axis and their contender."""
    rows = [row for row in measured["rows"] if row["figure"] == figure and not row["training"]]
    axis = "width" if len({row["tokens"] for row in rows}) == 1 else "tokens"
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[axis], {})[row["contender"]] = row
    return dict(sorted(found.items()))


def _figure(figure: str, measured: Mapping[str, Any]) -> list[str]:
    points = _points(figure, measured)
    if not points:
        return []
    first = next(iter(next(iter(points.values())).values()))
    names = list(next(iter(points.values())))
    fixed = [f"{letter} = {first[key]}" for letter, key in (("K", "heads"), ("n", "tokens"), ("d", "width"))]
    over = "d" if len({row["tokens"] for found in points.values() for row in found.values()}) == 1 else "n"
    sizes = ", ".join(text for text in fixed if not text.startswith(over))
    rows = [[f"{place:,}", *(_time_and_memory(found.get(name)) for name in names)] for place, found in points.items()]
    layers = "one layer" if first["depth"] == 1 else f"{first['depth']} layers"
    said = f"`{figure}`: {layers}, {sizes}; milliseconds and megabytes beside the weights, over {over}."
    return [said, _table([over, *names], rows).markdown()]


def _in_turns(measured: Mapping[str, Any]) -> list[str]:
    """Return the ratios of runs in turns, which do not depend on what else the machine did."""
    return [
        f"One layer in turns, {pair['tokens']:,} tokens, forward{' and backward' if pair['training'] else ''}: softmax "
        f"attention on the fused kernel takes {pair['ratio']['median']:.1f} times as long as ToST (quartiles "
        f"{pair['ratio']['lower']:.1f} to {pair['ratio']['upper']:.1f})."
        for pair in measured["pairs"]
    ]


def _time_and_memory(row: Mapping[str, Any] | None) -> str:
    if row is None or row["seconds"] is None:
        return "not measured" if row is None else row["note"]
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 1e6:,.1f} MB"
    return f"{1000 * row['seconds']['median']:,.1f} ms{memory}"


def _relative(figures: Sequence[str], wanted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Return time and memory, weights included, relative to other contenders."""
    rows = []
    for figure in figures:
        points = _points(figure, measured)
        for other in wanted["others"]:
            cells = []
            for tokens in wanted["tokens"]:
                pair = [points.get(int(tokens), {}).get(name) for name in ("tost", other)]
                cells += [_ratio(pair, value) for value in (_seconds, _all_bytes)]
            rows.append([f"`{figure}`: tost / {other}", *cells])
    headers = ["", *(f"{tokens}, {what}" for tokens in wanted["tokens"] for what in ("time", "memory"))]
    return ["A forward pass; memory with the weights.", _table(headers, rows).markdown()]


def _ratio(pair: Sequence[Mapping[str, Any] | None], value: Callable[[Mapping[str, Any]], float | None]) -> str:
    ours, theirs = (None if row is None else value(row) for row in pair)
    return f"{ours / theirs:.2f}" if ours and theirs else "not measured"


def _seconds(row: Mapping[str, Any]) -> float | None:
    found: float | None = row["seconds"] and row["seconds"]["median"]
    return found


def _all_bytes(row: Mapping[str, Any]) -> float | None:
    peak: float | None = row["peak_bytes"]
    return peak and peak + row["weight_bytes"]


def _steps(wanted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Return the training steps of whole models, relative to those of others."""
    found = {(row["contender"], str(row["tokens"])): row for row in measured["rows"] if row["part"] == "train"}
    rows = []
    for other in wanted["others"]:
        cells = []
        for tokens in wanted["tokens"]:
            ours, theirs = found[wanted["model"], tokens], found[other, tokens]
            cells += [f"{ours['ratios'][other]['median']:.2f}", f"{ours['peak_bytes'] / theirs['peak_bytes']:.2f}"]
        rows.append([f"{wanted['model']} / {other}", *cells])
    said = f"**Measured here**, a training step (forward, loss, backward) of whole models, {_machine(measured)}:"
    headers = ["", *(f"{tokens}, {what}" for tokens in wanted["tokens"] for what in ("time", "memory"))]
    return [said, _table(headers, rows).markdown()]


def _growth(wanted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    rows = []
    for name in wanted["contenders"]:
        for found in measured["growth"]:
            if (found["contender"], found["op"], found["mode"]) == (name, wanted["op"], wanted["mode"]):
                lengths = f"{found['from_tokens']:,} to {found['to_tokens']:,}"
                rows.append([measured["contenders"][name], lengths, f"{found['factor']:.2f}"])
    headers = ["layer", "tokens", "time per token grows by a factor of"]
    return [f"**Measured here**, {_machine(measured)}:", _table(headers, rows, labels=2).markdown()]


def _machine(measured: Mapping[str, Any]) -> str:
    place = measured["environment"]
    device = measured.get("accelerator") or f"{place['cpu']}, {place['threads']} threads"
    return f"{device}, {str(place['measured'])[:10]}"


def _overview(found: Sequence[Mapping[str, Any]], results: Path) -> str:
    """Return one line per table or figure: what of it exists here."""
    rows = []
    for entry in found:
        anchor = re.sub(r"[^\w\- ]", "", f"{entry['name']}: {entry['title']}".lower()).replace(" ", "-")
        measured = any((results / f"{name}.json").exists() for name in entry.get("sweeps", []))
        if "needs" in entry:
            state = "not run at this size; a smaller experiment" if measured else "not run"
        elif "growth" in entry or "figures" in entry:
            state = "measured on a CPU"
        else:
            state = "compared with the models here"
        rows.append([f"[{entry['name']}](#{anchor})", entry["title"], state])
    return _table(["paper", "what", "here"], rows, labels=3).markdown()


def generate(results: Path = RESULTS, measurements: Path = MEASUREMENTS) -> str:
    """Return the text of the page.

    Raises:
        SystemExit: A stored file cannot be used; the message names it.
    """
    found = entries()
    try:
        sections = [section(entry, results, measurements) for entry in found]
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    return "\n\n".join([INTRODUCTION, _overview(found, results), *sections]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return update_page(PAGE, generate, __doc__, arguments, ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
