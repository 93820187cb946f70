"""Run folders and measurements made up for tests of the page: nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = """recipe: {recipe}
model: {{name: {model}, embed_dim: 64, depth: 4, num_heads: 8}}
data: {{name: {data}}}
train: {{steps: 40, batch_size: 16, seed: 3}}
optim: {{name: adamw, lr: 1.0e-3, weight_decay: 0.02}}
schedule: {{name: cosine, warmup_steps: 2}}
checkpoint: {{best_metric: {metric}, best_mode: {mode}}}
"""


def write_run(
    folder: Path,
    *,
    model: str = "lra_image",
    data: str = "digits",
    recipe: str = "classification",
    accuracy: float = 0.9,
    steps: int = 40,
    **summary: Any,
) -> Path:
    """Write the folder of a finished run."""
    folder.mkdir(parents=True)
    metric, mode = ("loss", "min") if recipe == "language_modeling" else ("accuracy", "max")
    text = CONFIG.format(recipe=recipe, model=model, data=data, metric=metric, mode=mode)
    (folder / "config.yaml").write_text(text)
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        records.append({"kind": "step", "step": step, "steps": steps, "loss": 2.0 / step, "tokens_per_second": 1000.0})
        if step % 10 == 0:
            layers = {f"compression/layer_{layer:02d}": 3.0 - 0.1 * layer for layer in range(4)}
            layers |= {f"compression/change_{layer:02d}": 1.5 / step - 0.1 * layer for layer in range(4)}
            records.append({"kind": "evaluation", "step": step, "loss": 2.1 / step, "accuracy": accuracy, **layers})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ending = {
        "status": "finished",
        "final": {"accuracy": accuracy, "loss": 0.4321},
        "parameters": 123_456,
        "seconds": 65.0,
        "peak_memory_bytes": 512_000_000,
    }
    (folder / "summary.json").write_text(json.dumps({**ending, **summary}))
    machine = {"cpu": "A CPU", "threads": 2, "device": "cpu", "platform": "Linux", "python": "3.11"}
    command = {"command": ["tost", "train", "demo/digits"], "versions": {"torch": "2.13"}, "revision": "abc"}
    (folder / "env.json").write_text(json.dumps({**machine, **command}))
    return folder


def bench(*, passed: bool = True, theme: str = "ops", **changes: Any) -> dict[str, Any]:
    """Return what `tost bench ops` would write."""
    rows = [
        {
            "op": "tssa",
            "mode": "fwd",
            "batch": 1,
            "width": 384,
            "heads": 8,
            "dtype": "float32",
            "tokens": tokens,
            "contender": name,
            "seconds_median": seconds * tokens,
        }
        for tokens in (256, 1024)
        for name, seconds in (("limit", 1e-6), ("tost", 2e-6), ("sdpa", 2.5e-5))
    ]
    return {
        "theme": theme,
        "command": "tost bench ops --quick",
        "complete": True,
        "environment": {"cpu": "A CPU", "threads": 2, "torch": "2.13", "tost": "0.1.0", "measured": "2001-02-03"},
        "gate": {"passed": passed, "checks": 77, "failures": [] if passed else ["wrong"]},
        "contenders": {"tost": "ours", "sdpa": "softmax"},
        "rows": rows,
        **changes,
    }


def write_bench(path: Path, **changes: Any) -> Path:
    """Write a measurement."""
    path.write_text(json.dumps(bench(**changes)))
    return path
