"""Measures language models on windows longer than those they were trained with.

python scripts/measure_lengths.py --runs runs/language_positions --out results/lengths.json

The folder is that of `tost sweep language_positions`. Models with learned positions go on with the last one
(after_last_position=repeat). Of each window only the last tokens are scored, as many as a training window has, so that
all lengths predict nearly the same text and differ in what comes before it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tost.data.tokens.reader import open_tokens
from tost.recipes import load_config
from tost.train.checkpoint.model import build_saved, read_saved
from tost.train.evaluate.perplexity import score_windows

__all__ = ["main", "measure"]

TIMES = (1, 8)
TOKENS = 32_768
"""How much of the validation text is read."""


def measure(run: Path) -> dict[str, float]:
    """Return the loss of a run's model by the length of the windows."""
    config = load_config(str(run / "config.yaml"))
    saved = read_saved(run)
    changes = {"after_last_position": "repeat"} if saved.options["position"] == "learned" else {}
    model = build_saved(saved, str(run), changes).eval()
    text = open_tokens(config.data.path or "").split(config.data.options["validation_split"]).tokens[:TOKENS]
    trained = config.data.options["length"]
    lengths = [times * trained for times in TIMES]
    return {
        str(length): score_windows(model, text, length=length, stride=trained, batch_size=4).loss for length in lengths
    }


def main() -> None:
    """Measure all runs and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for arm in sorted(path for path in options.runs.iterdir() if path.is_dir()):
        seeds = [measure(run) for run in sorted(arm.glob("seed*"))]
        found[arm.name] = {
            length: {
                "mean": mean(seed[length] for seed in seeds),
                "std": stdev(seed[length] for seed in seeds) if len(seeds) > 1 else None,
                "seeds": len(seeds),
            }
            for length in seeds[0]
        }
        print(arm.name, found[arm.name], flush=True)
    options.out.write_text(json.dumps({"loss": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
