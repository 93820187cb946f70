"""Fills the README's table, and the plots of README and docs, from the newest stored measurements.

No number is typed by hand.

python scripts/update_readme.py           rewrite README.md and the plots in docs/img
python scripts/update_readme.py --check   only say whether they are up to date; exit code 1 if not
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from page_file import MEASUREMENTS, ROOT, newest

__all__ = ["main", "render", "stored", "updated"]

README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "img"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
LIMIT = "limit"


def stored(theme: str, folder: Path = MEASUREMENTS) -> Path:
    """Return the newest measurement of a theme that can be shown.

    Raises:
        SystemExit: There is none.
    """
    found = newest(theme, folder)
    if found is None:
        raise SystemExit(f"no complete measurement in {folder}; run `tost bench {theme} --out {folder}` first")
    return found


def render(result: dict[str, Any]) -> str:
    """Return the Markdown that stands between the markers: one table and the conditions it was measured under."""
    rows = [row for row in result["rows"] if row["dtype"] == "float32" and row["contender"] != LIMIT]
    contenders = [name for name in result["contenders"] if any(row["contender"] == name for row in rows)]
    cases: dict[tuple[object, ...], dict[str, str]] = {}
    for row in rows:
        size = f"{row['tokens']:,}" if row["batch"] == 1 else f"{row['batch']} x {row['tokens']:,}"
        case = (f"`{row['op']}`", row["mode"], f"{row['width']} / {row['heads']}", size)
        ratio = row["ratio_to_limit_median"]
        cases.setdefault(case, {})[row["contender"]] = "skipped" if ratio is None else f"{ratio:.2f}"
    headers = ["operator", "pass", "width / heads", "tokens", *contenders]
    lines = [headers, ["---"] * 3 + ["---:"] * (len(headers) - 3)]
    lines += [[*map(str, case), *(cells.get(name, "") for name in contenders)] for case, cells in cases.items()]
    environment = result["environment"]
    return "\n".join(
        [
            "Time of one attention layer, as a multiple of the time of the two linear projections inside it:",
            "",
            *(f"| {' | '.join(cells)} |" for cells in lines),
            "",
            "; ".join(f"**{name}**: {result['contenders'][name]}" for name in contenders) + ".",
            "",
            f"*{environment['cpu']}, {environment['threads']} threads, torch {environment['torch']}, "
            f"tost {environment['tost']}, {environment['measured'][:10]}.*",
        ]
    )


def updated(readme: str, result: Path) -> str:
    """Return the text of the README with the block between the markers made anew from the file `result`.

    Raises:
        SystemExit: The markers are missing, repeated or in the wrong order.
    """
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end or START in after or END in before + after:
        raise SystemExit(f"README.md needs exactly one {START} and, below it, one {END}")
    return f"{before}{START}\n{render(json.loads(result.read_text()))}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    result, figures = stored("ops"), stored("attention")
    wanted = {
        README: updated(README.read_text(), result),
        IMAGES / "speed.svg": result.with_suffix(".svg").read_text(),
        IMAGES / "attention.svg": figures.with_name(f"{figures.stem}_tokens.svg").read_text(),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        sys.stdout.write(f"{path.relative_to(ROOT)} {'is out of date' if options.check else 'updated'}\n")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
