"""Draws the pictures of docs/look-inside.md anew, from a finished demonstration.

make demo
python scripts/update_pictures.py demo/runs/bytes-tost
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from page_file import ROOT

__all__ = ["PICTURES", "main"]

IMAGES = ROOT / "docs" / "img"
TEXT = ROOT / "src" / "tost" / "errors.py"
# Analysis, the kind of picture, and its file in the documentation.
PICTURES = (
    ("coding-rate", ".svg", "look_rates.svg"),
    ("text-memberships", ".png", "look_text.png"),
    ("state-memory", ".svg", "look_memory.svg"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of a language model that reads bytes")
    run = parser.parse_args(arguments).run
    with tempfile.TemporaryDirectory() as folder:
        for name, suffix, file in PICTURES:
            # Which groups the bytes of a text belong to is shown on a file of this project.
            text = ("--text", str(TEXT)) if name == "text-memberships" else ()
            command = [sys.executable, "-m", "tost.cli", "analyze", str(run), name, *text, "--out", folder]
            code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
            if code != 0:
                return code
            shutil.copyfile(Path(folder) / f"{name}{suffix}", IMAGES / file)
            sys.stdout.write(f"{(IMAGES / file).relative_to(ROOT)} drawn\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
