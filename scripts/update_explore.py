"""Fills the times of docs/explore.md from results/explore.json. No number is typed by hand.

python scripts/update_explore.py           rewrite the table
python scripts/update_explore.py --check   only say whether it is up to date; exit code 1 if not

`scripts/measure_explore.py` stores the times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_file import ROOT, update_page
from update_readme import updated

from tost._text import Table

__all__ = ["generate", "main"]

FILE = ROOT / "results" / "explore.json"
PAGE = ROOT / "docs" / "explore.md"
NAMES = {
    "first_text": "from the command to the first coloured text",
    "keystroke": "from a keystroke to the colours of {tokens} tokens",
    "image_maps": "from a click on a sample to its maps",
}


def generate(file: Path = FILE, page: Path = PAGE) -> str:
    """Return the text of the page.

    Args:
        file: The stored times.
        page: The page as it is now; what stands between its markers is replaced.
    """
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows = [
        (
            about.format(tokens=stored["tokens"]),
            *(_time(found[key]) for key in ("median_seconds", "slowest_seconds")),
            f"under {_time(found['promised_seconds'])}",
        )
        for name, about in NAMES.items()
        if (found := stored["times"][name])
    ]
    place = stored["environment"]
    note = (
        f"*{place['cpu']}, {place['cores']} cores, torch {place['torch']}, tost {place['tost']}, "
        f"{place['measured'][:10]}.*"
    )
    headers = ("", "median", "slowest", "promised")
    table = Table(headers=headers, rows=rows).markdown()
    return updated(page.read_text(encoding="utf-8"), {"times": f"{table}\n\n{note}"})


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return update_page(PAGE, generate, __doc__, arguments, ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
