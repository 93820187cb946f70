"""Draws the pictures of docs/look-inside.md anew, from the models in the box.

python scripts/update_pictures.py
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
SOURCE = ROOT / "src" / "tost"
TEXT = ("bytes-tiny", "--text", str(SOURCE / "analysis" / "rates.py"))
# The picture, the analysis, and the model with its samples.
PICTURES = {
    "look_rates.svg": ("coding-rate", TEXT),
    "look_text.png": ("text-memberships", ("bytes-tiny", "--text", str(SOURCE / "errors.py"))),
    "look_memory.svg": ("state-memory", TEXT),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    with tempfile.TemporaryDirectory() as folder:
        for file, (name, (model, *samples)) in PICTURES.items():
            command = [sys.executable, "-m", "tost.cli", "analyze", model, name, *samples, "--out", folder]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            shutil.copyfile(Path(folder) / f"{name}{Path(file).suffix}", IMAGES / file)
            sys.stdout.write(f"{file} drawn\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
