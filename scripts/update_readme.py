"""Fills the tables of README, front page and operator page, and the plots of README and docs, from stored measurements.

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

from page_file import MEASUREMENTS, ROOT, newest, usable
from results_page import fill

from tost.sweep import read_results

__all__ = ["main", "render_blocks", "render_losses", "render_speed", "stored", "updated"]

README = ROOT / "README.md"
FRONT = ROOT / "docs" / "index.md"
OPERATOR = ROOT / "docs" / "operator.md"
IMAGES = ROOT / "docs" / "img"
RESULTS = ROOT / "results"
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
# The sweep of each text, and what the table calls its arms.
TEXTS = {
    "Shakespeare": "language_long_shakespeare",
    "WikiText-2 bytes": "language_long_wikitext",
    "WikiText-2, 3x the steps": "language_longer_wikitext",
}
MIXERS = {
    "none": "none",
    "softmax": "softmax attention (GPT)",
    "gated_delta": "Gated DeltaNet",
    "mingru": "minGRU",
    "gated_tssa": "token statistics about a gated mean (`tost_lm_*_plus2`)",
}
RECALL = """\
| mixer | state, bytes | recalled |
| --- | ---: | ---: |
| none | {none.state_bytes:,} | {none.accuracy.mean:.1f} % |
| TSSA as in the paper | {tssa.state_bytes:,} | {tssa.accuracy.mean:.1f} % |
| S4D | {s4d.state_bytes:,} | {s4d.accuracy.mean:.1f} % |
| TSSA in blocks of 16 features | {tssa_16.state_bytes:,} | {tssa_16.accuracy.mean:.1f} % |
| TSSA in blocks of 32 features | {tssa_32.state_bytes:,} | {tssa_32.accuracy.mean:.1f} % |
| linear attention | {linear.state_bytes:,} | {linear.accuracy.mean:.1f} % |
| Gated DeltaNet | {gated_delta.state_bytes:,} | {gated_delta.accuracy.mean:.1f} % |
| softmax attention | {softmax.state_bytes:,} | {softmax.accuracy.mean:.1f} % |"""


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
    lines = [["operator", "width / heads", "tokens", *SPEED_COLUMNS.values()]]
    lines += [["---", "---"] + ["---:"] * (1 + len(SPEED_COLUMNS))]
    lines += [
        [f"`{case[0]}`", sizes[case], f"{case[1]:,}", *(cells.get(name, "") for name in SPEED_COLUMNS)]
        for case, cells in milliseconds.items()
        if cells
    ]
    place = measured["environment"]
    return "\n".join(
        [
            *(f"| {' | '.join(cells)} |" for cells in lines),
            "",
            f"*{place['cpu']}, {place['threads']} threads, torch {place['torch']}, tost {place['tost']}, "
            f"{place['measured'][:10]}.*",
        ]
    )


def render_blocks(folder: Path = MEASUREMENTS) -> str:
    """Return what layers in blocks take of the time of their matrix products, with a column for each machine."""
    columns: dict[str, dict[tuple[str, ...], str]] = {}
    for measured in usable("ops-selection", folder).values():
        rows = [row for row in measured["rows"] if row["contender"] == "tost" and row["block_size"] == BLOCK_SIZE]
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


def render_losses(sweeps: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of validation losses, from the results of a sweep for each text; "-" where an arm was not run."""
    first = next(iter(sweeps.values()))["arms"]
    lines = [f"| mixer | state, bytes | {' | '.join(f'loss, {text}' for text in sweeps)} |"]
    lines += [f"| --- | ---: |{' ---: |' * len(sweeps)}"]
    for arm, name in MIXERS.items():
        found = [sweep["arms"].get(arm) for sweep in sweeps.values()]
        losses = [f"{each['metrics']['loss']['mean']:.3f}" if each else "-" for each in found]
        lines += [f"| {name} | {first[arm]['state_bytes']:,} | {' | '.join(losses)} |"]
    return "\n".join(lines)


def _three_digits(number: float) -> str:
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"


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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    speed, figures = stored("ops"), stored("attention")
    blocks = {"bench": render_speed(json.loads(speed.read_text()))}
    blocks["result"] = render_losses({text: read_results(RESULTS / f"{name}.json") for text, name in TEXTS.items()})
    blocks["recall"] = fill(RECALL, read_results(RESULTS / "probes_recall.json"))
    wanted = {
        **{page: updated(page.read_text(), blocks) for page in (README, FRONT)},
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
