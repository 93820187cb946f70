"""What the scripts that generate a page of the documentation have in common."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["MEASUREMENTS", "ROOT", "newest", "update_page", "updated", "usable"]

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = ROOT / "benchmarks" / "results"


def newest(theme: str, folder: Path = MEASUREMENTS) -> Path | None:
    """Return the file of the latest measurement that can be shown; None if there is none. Arguments as for `usable`."""
    found = usable(theme, folder)
    return max(found, key=lambda path: found[path]["environment"]["measured"], default=None)


def usable(theme: str, folder: Path = MEASUREMENTS) -> dict[Path, dict[str, Any]]:
    """Return the complete measurements whose gate was green, by their files.

    Args:
        theme: What was measured, as in `tost bench THEME`.
        folder: Where measurements are stored.
    """
    found = {path: json.loads(path.read_text()) for path in sorted(folder.glob(f"{theme}_*.json"))}
    return {path: result for path, result in found.items() if result.get("complete", True) and result["gate"]["passed"]}


def updated(page: str, blocks: Mapping[str, str]) -> str:
    """Return the text of a page with the text between each pair of markers made anew.

    Args:
        page: Old text. ``<!-- NAME:start -->`` and ``<!-- NAME:end -->`` enclose each block.
        blocks: New text of the blocks, by name.

    Raises:
        SystemExit: Markers are missing, repeated or in the wrong order.
    """
    for name, text in blocks.items():
        first, last = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        before, start, rest = page.partition(first)
        _, end, after = rest.partition(last)
        if not start or not end or first in after or last in before + after:
            raise SystemExit(f"the page needs exactly one {first} and, below it, one {last}")
        page = f"{before}{first}\n{text}\n{last}{after}"
    return page


def update_page(
    page: Path, generate: Callable[[], str], about: str | None, arguments: list[str] | None, root: Path = ROOT
) -> int:
    """Rewrite a page if it is out of date, or with ``--check`` only say so.

    Args:
        page: The file.
        generate: Makes its text.
        about: Text of the help.
        arguments: Command line; None for that of the process.
        root: Folder that its name is shown relative to.

    Returns:
        The exit code: 1 if ``--check`` finds it out of date.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    text = generate()
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return 0
    if not options.check:
        page.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{page.relative_to(root)} {'is out of date' if options.check else 'updated'}\n")
    return int(options.check)
