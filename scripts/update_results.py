"""Makes docs/results.md from the stored results of sweeps. No number is typed by hand.

python scripts/update_results.py           rewrite docs/results.md
python scripts/update_results.py --check   only say whether it is up to date; exit code 1 if not

`tost sweep PLAN ... --store results/NAME.json` stores a sweep. Beside it, results/NAME.md may hold what is to be said
about it; its numbers are placeholders such as {arm.metric.mean:.1f}, see `fill` in results_page.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from page_file import ROOT, update_page
from results_page import page, section

from tost.errors import ConfigError
from tost.sweep import read_results, state_picture

__all__ = ["draw", "generate", "main"]

RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "img"
OTHERS = ("stress", "fuzz", "sanitize", "lengths", "explore")
"""Results of other programs, which other pages show."""


def generate(folder: Path = RESULTS) -> str:
    """Return the text of the page.

    Args:
        folder: Where the stored results are.

    Raises:
        SystemExit: A file cannot be used; the message names it.
    """
    sections = []
    for path in sorted(path for path in folder.glob("*.json") if path.stem not in OTHERS):
        commentary = path.with_suffix(".md")
        try:
            results = read_results(path)
        except ConfigError as error:
            raise SystemExit(str(error)) from None
        if not results["complete"]:
            raise SystemExit(f"{path} is of a sweep that is not finished; store it again with `tost sweep ... --store`")
        try:
            sections.append(section(results, commentary.read_text(encoding="utf-8") if commentary.exists() else ""))
        except ConfigError as error:
            raise SystemExit(f"{commentary}: {error}") from None
    for path in sorted(folder.glob("*.md")):
        if not path.with_suffix(".json").exists():
            raise SystemExit(f"{path} is about a sweep whose results are not stored; there is no {path.stem}.json")
    return page(sections)


def draw(folder: Path = RESULTS, images: Path = IMAGES) -> None:
    """Draw the pictures of the page: what arms reach over the size of their states, where a sweep measured these."""
    for path in sorted(path for path in folder.glob("*.json") if path.stem not in OTHERS):
        results = read_results(path)
        if (picture := state_picture(results)) is not None:
            images.mkdir(parents=True, exist_ok=True)
            (images / f"{results['name']}.svg").write_bytes(picture)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    code = update_page(PAGE, generate, __doc__, arguments, ROOT)
    if "--check" not in (sys.argv if arguments is None else arguments):
        draw()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
