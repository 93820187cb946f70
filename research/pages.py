"""Pages that are made from stored results. No number in them is typed by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

from scripts.page_file import updated

from research.paper import paper_tables
from research.results import RESULTS, read_results
from research.tables import fill, section

__all__ = ["generate", "update"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FRONT = (ROOT / "README.md", DOCS / "index.md")
HEADING = """# Stored results

Made by `python -m research pages` from the files beside it. "±" is the standard deviation over seeds; the metric is
that of the last step. Rows marked "(uncommitted)" hold runs of a revision that was not committed: README and docs do
not show them.
"""


def generate() -> dict[Path, str]:
    """Return the text of every page, by its file; README and front page show the first table of tried.md."""
    sections = [section(read_results(path)) for path in sorted(RESULTS.glob("*.json"))]
    tried = fill((Path(__file__).parent / "tried.md").read_text(encoding="utf-8"))
    verdict = "\n".join(itertools.takewhile(lambda line: line, tried[tried.index("\n| ") + 1 :].splitlines()))
    return {
        RESULTS / "README.md": "\n\n".join([HEADING.strip(), *sections]) + "\n",
        DOCS / "tried.md": tried,
        DOCS / "paper-tables.md": paper_tables(),
        **{page: updated(page.read_text(encoding="utf-8"), {"result": verdict}) for page in FRONT},
    }


def update(*, check: bool) -> int:
    """Rewrite pages that are out of date, or only name them; return the exit code."""
    stale = [path for path, text in generate().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(generate()[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'updated'}")
    return int(check and bool(stale))
