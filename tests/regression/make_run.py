"""Write the small run folder beside this file; run once, with the version whose format is to stay readable.

The folder was written by version 0.1.0, before run folders had a format version and before ``regularise`` became
``regularize``. It is kept as it is: `test_run.py` reads it with today's code.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent / "run"
OPTIONS = (
    *("model.embed_dim=16", "model.depth=1", "model.num_heads=2", "train.steps=4", "train.batch_size=8"),
    *("checkpoint.every=4", "checkpoint.keep=1", "evaluate.every=4", "evaluate.batch_size=60", "evaluate.batches=2"),
    "train.ema_decay=0.9",
)


def main() -> None:
    """Train for four steps; the links to the last and the best checkpoint are not kept."""
    command = [sys.executable, "-m", "tost.cli", "train", "demo/digits", *OPTIONS, "--out", str(HERE)]
    subprocess.run(command, check=True)
    for name in ("last", "best"):
        (HERE / "checkpoints" / name).unlink()


if __name__ == "__main__":
    main()
