"""The page of the paper's tables: its numbers, our sizes and schedules beside them, and the commands for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

import tost
from research.tables import fill, markdown
from tost.models import model_options
from tost.recipes import load_config

__all__ = ["entries", "paper_tables", "section"]

HEADING = """# The paper's tables and ours

Every table and figure of the paper ([arXiv:2412.17810](https://arxiv.org/abs/2412.17810)) that holds a result: its
numbers, the commands that reproduce it, and what was measured here. Most of it takes machines that this project does
not have. A row "here" is computed from our models or recipes and shown where it differs. Times and memory are on the
page [Efficiency](efficiency.md), small experiments in [Tried, and what came of it](tried.md).

This page is made by `python -m research pages` from `research/paper_tables.yaml`.
"""
SHAPES = {"heads K": "num_heads", "layers L": "depth", "width d": "embed_dim"}


def entries() -> list[dict[str, Any]]:
    """Return the paper's tables and figures; numbers are text, with the digits that the paper prints."""
    source = Path(__file__).parent / "paper_tables.yaml"
    return yaml.load(source.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def paper_tables() -> str:
    """Return the text of the page."""
    return "\n\n".join([HEADING.strip(), *map(section, entries())]) + "\n"


def section(entry: Mapping[str, Any]) -> str:
    """Return the part of the page about one table or figure."""
    parts = [f"## {entry['name']}: {entry['title']}"]
    if "rows" in entry:
        ours, rows = _ours(entry), [entry["columns"]]
        for label, *cells in entry["rows"]:
            rows.append([label, *cells])
            if label in ours and not all(map(_same, cells, ours[label])):
                rows.append([f"{label}, here", *ours[label]])
        parts.append(markdown(rows))
    parts += [entry[key].strip() for key in ("text", "note") if key in entry]
    parts.append("\n".join(["```shell", *entry["commands"], "```"]))
    parts += [f"Not run here: needs {entry['needs'].strip()}."] if "needs" in entry else []
    parts += [fill(entry["measured"]).strip()] if "measured" in entry else []
    return "\n\n".join(parts)


def _ours(entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return rows computed from our models or configurations, for the columns of the paper."""
    if "configs" in entry:
        return _schedules(entry["configs"])
    with torch.device("meta"):
        models = [tost.create_model(name) for name in entry.get("models", [])]
    if "shapes" in entry:
        options = [model_options(name, {}).model_dump() for name in entry["models"]]
        rows = {label: [str(found[key]) for found in options] for label, key in SHAPES.items()}
        return rows | {"head width p": [str(found["embed_dim"] // found["num_heads"]) for found in options]}
    return {"parameters": [f"{model.num_parameters() / 1e6:.1f}M" for model in models]} if models else {}


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
    """Return whether two cells are equal as text or number, or ours rounds to the paper's."""
    if paper == ours:
        return True
    try:
        values = [float(text.removesuffix("M")) for text in (paper, ours)]
    except ValueError:
        return False
    digits = len(paper.removesuffix("M").partition(".")[2])
    return values[0] == values[1] or (paper.endswith("M") and round(values[1], digits) == values[0])
