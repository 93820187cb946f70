"""Fills the tables of speed in README, front page, operator and deploy page, and copies plots, from measurements.

No number is typed by hand.

python scripts/update_readme.py           rewrite the pages and the plots in docs/img
python scripts/update_readme.py --check   only say whether they are up to date; exit code 1 if not
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page_file import MEASUREMENTS, ROOT, newest, updated, usable

__all__ = ["main", "render_blocks", "render_speed", "stored", "updated"]

README = ROOT / "README.md"
FRONT = ROOT / "docs" / "index.md"
OPERATOR = ROOT / "docs" / "operator.md"
DEPLOY = ROOT / "docs" / "deploy.md"
IMAGES = ROOT / "docs" / "img"
# Four rows of the stored measurement are enough for a first impression: operator and number of tokens.
SPEED_ROWS = (("tssa", 1024), ("tssa", 10_240), ("tssa", 65_536), ("causal_tssa", 8192))
SPEED_COLUMNS = {
    "tost": "tost",
    "paper compiled": "paper's listing, compiled",
    "sdpa": "softmax attention",
    "limit": "matrix products alone",
}
BLOCK_SIZE = 8
PASSES = {"fwd": "forward", "fwd+bwd": "with backward"}


def stored(theme: str, folder: Path = MEASUREMENTS) -> Path:
    """Return the newest measurement of a theme that can be shown.

    Raises:
        SystemExit: There is none.
    """
    found = newest(theme, folder)
    if found is None:
        raise SystemExit(f"no complete measurement in {folder}; run `tost bench {theme} --out {folder}` first")
    return found


def render_speed(measured: Mapping[str, Any]) -> str:
    """Return a table of milliseconds, and the conditions under which they were measured."""
    milliseconds: dict[tuple[str, int], dict[str, str]] = {case: {} for case in SPEED_ROWS}
    sizes: dict[tuple[str, int], str] = {}
    for row in measured["rows"]:
        case, seconds = (row["op"], row["tokens"]), row["seconds_median"]
        if row["dtype"] == "float32" and row["mode"] == "fwd+bwd" and row["batch"] == 1 and case in milliseconds:
            sizes[case] = f"{row['width']} / {row['heads']}"
            milliseconds[case][row["contender"]] = "skipped" if seconds is None else _three_digits(1000 * seconds)
    caption = "Milliseconds for forward and backward of one layer; the last column is its two linear projections alone:"
    lines = [["operator", "width / heads", "tokens", *SPEED_COLUMNS.values()]]
    lines += [["---", "---"] + ["---:"] * (1 + len(SPEED_COLUMNS))]
    lines += [
        [f"`{case[0]}`", sizes[case], f"{case[1]:,}", *(cells.get(name, "") for name in SPEED_COLUMNS)]
        for case, cells in milliseconds.items()
        if cells
    ]
    return "\n".join([caption, "", *(f"| {' | '.join(cells)} |" for cells in lines), "", f"*{_place(measured)}*"])


def render_blocks(folder: Path = MEASUREMENTS) -> str:
    """Return what layers in blocks take of the time of their matrix products, with a column for each machine."""
    columns: dict[str, dict[tuple[str, ...], str]] = {}
    for measured in usable("ops-selection", folder).values():
        ours = [row for row in measured["rows"] if row["contender"] == "tost" and row["op"] != "causal_tssa"]
        rows = [row for row in ours if row["block_size"] == BLOCK_SIZE]
        if rows:
            place = measured["environment"]
            machine = f"{place['cpu']}, {place['native']['isa']}, {place['measured'][:10]}"
            columns[machine] = {
                (
                    f"`{row['op']}`",
                    f"{row['width']} / {row['heads']}",
                    f"{row['tokens']:,}",
                    PASSES[row["mode"]],
                ): f"{row['ratio_to_limit_median']:.2f}"
                for row in rows
            }
    cases = dict.fromkeys(case for cells in columns.values() for case in cells)
    lines = [["operator", "width / heads", "tokens", "pass", *columns], ["---", "---", "---:", "---"]]
    lines[1] += ["---:"] * len(columns)
    lines += [[*case, *(cells.get(case, "") for cells in columns.values())] for case in cases]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def whole_models(folder: Path = MEASUREMENTS) -> dict[str, Any] | None:
    """Return the newest measurement of whole models in every runtime; None if there is none."""
    found = [result for result in usable("model", folder).values() if "machine" in result]
    return max(found, key=lambda result: result["environment"]["measured"], default=None)


def render_models(measured: Mapping[str, Any]) -> str:
    """Return the milliseconds of whole models in every runtime, with the share of the machine's matrix product."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in measured["rows"]:
        shown = "does not fit"
        if row["seconds"] is not None:
            shown = _three_digits(1000 * row["seconds"]["median"])
            shown += "" if row["of_product"] is None else f" ({row['of_product']:.0%})"
        cells.setdefault((_input(row), f"`{row['model']}`"), {})[row["path"]] = shown
    paths = dict.fromkeys(path for line in cells.values() for path in line)
    lines = [["input", "model", *paths], ["---", "---"] + ["---:"] * len(paths)]
    lines += [[*case, *(line.get(path, "") for path in paths)] for case, line in cells.items()]
    machine = measured["machine"]
    rates = ", ".join(f"{rate:,.0f} GFLOP/s in {dtype}" for dtype, rate in machine["gflops"].items())
    about = f"Milliseconds, and the share of the matrix product of this machine: {rates}. {_place(measured)}"
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", f"*{about}*"])


def render_best(measured: Mapping[str, Any]) -> str:
    """Return the milliseconds of each model in the runtime that is fastest for it."""
    best: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in measured["rows"]:
        models = best.setdefault(_input(row), {})
        found = models.get(row["model"])
        if row["seconds"] and (found is None or row["seconds"]["median"] < found["seconds"]["median"]):
            models[row["model"]] = row
    lines = [["input", "model, milliseconds in its fastest runtime"], ["---", "---"]]
    for case, models in best.items():
        shown = (f"`{n}` {_three_digits(1e3 * r['seconds']['median'])} ({r['path']})" for n, r in models.items())
        lines.append([case, ", ".join(shown)])
    caption = "Milliseconds of whole models; with the share of the machine they are on the page Deploy:"
    return "\n".join([caption, "", *(f"| {' | '.join(line)} |" for line in lines), "", f"*{_place(measured)}*"])


def _input(row: Mapping[str, Any]) -> str:
    return f"{row['size']:,} tokens" if row["limit"] else f"{row['batch']} x {row['size']} px"


def _place(measured: Mapping[str, Any]) -> str:
    place = measured["environment"]
    versions = f"torch {place['torch']}, tost {place['tost']}, {place['measured'][:10]}"
    return f"{place['cpu']}, {place['threads']} threads, {versions}."


def _three_digits(number: float) -> str:
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    speed, figures, models = stored("ops"), stored("attention"), whole_models()
    shown = render_speed(json.loads(speed.read_text())) if models is None else render_best(models)
    table = "Not measured on this machine yet." if models is None else render_models(models)
    wanted = {
        **{page: updated(page.read_text(), {"bench": shown}) for page in (README, FRONT)},
        DEPLOY: updated(DEPLOY.read_text(), {"models": table}),
        OPERATOR: updated(OPERATOR.read_text(), {"blocks": render_blocks()}),
        IMAGES / "speed.svg": speed.with_suffix(".svg").read_text(),
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
