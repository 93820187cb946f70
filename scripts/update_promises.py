"""Fills docs/promises.md with the stored results of `scripts/stress`, of the fuzzer and of the sanitizers.

python scripts/update_promises.py           rewrite the tables
python scripts/update_promises.py --check   only say whether they are up to date; exit code 1 if not
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page_file import ROOT, update_page
from stress.record import summed, table

from tost._text import Table, duration, number

__all__ = ["generate", "main"]

RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "promises.md"


def stress_section(results: Mapping[str, Any]) -> str:
    """Return a sentence and a table about what was done to runs and commands."""
    total = summed(results)
    told = (
        f"{number(total['kills'])} kills and {number(total['disturbances'])} other disturbances, "
        f"{number(total['compared'])} comparisons with an undisturbed run, {number(total['differences'])} differences "
        f"(tost {results['tost']}, {results['cpu']}, {results['date']})."
    )
    return f"{told}\n\n{table(results).markdown()}"


def fuzz_section(results: Mapping[str, Any]) -> str:
    """Return a sentence and a table about what was fed to parsers."""
    targets = results["targets"]
    sums = {key: sum(target[key] for target in targets) for key in ("inputs", "seconds", "problems")}
    told = (
        f"{number(sums['inputs'])} inputs to {number(len(targets))} parsers in {duration(sums['seconds'])} "
        f"of processor time, {number(sums['problems'])} problems (tost {results['tost']}, {results['date'][:10]})."
    )
    rows = [
        [
            f"`{target['name']}`",
            number(target["inputs"]),
            duration(target["seconds"]),
            number(target["coverage"]),
            number(target["quiet_inputs"]),
            duration(target["quiet_seconds"]),
            number(target["problems"]),
        ]
        for target in targets
    ]
    shown = Table(
        headers=[
            "parser",
            "inputs",
            "time",
            "branches",
            "inputs since the last new branch",
            "whole turns since",
            "problems",
        ],
        rows=rows,
    )
    return f"{told}\n\n{shown.markdown()}"


def sanitize_section(results: Mapping[str, Any]) -> str:
    """Return a table about what the sanitizers said."""
    names = {"address": "AddressSanitizer, UndefinedBehaviorSanitizer", "thread": "ThreadSanitizer"}
    rows = [
        [
            names[run["sanitizer"]],
            f"`{run['isa']}`",
            number(run["tests"]),
            duration(run["seconds"]),
            number(run["problems"]),
        ]
        for run in results["runs"]
    ]
    shown = Table(headers=["sanitizer", "instruction set", "tests passed", "time", "problems"], rows=rows)
    return f"tost {results['tost']}, {results['date']}.\n\n{shown.markdown()}"


def generate(folder: Path = RESULTS, page: Path = PAGE) -> str:
    """Return the text of the page.

    Args:
        folder: Where the stored results are.
        page: The page as it is now; what stands between its markers is replaced.
    """
    text = page.read_text(encoding="utf-8")
    sections = {"stress": stress_section, "fuzz": fuzz_section, "sanitize": sanitize_section}
    for name, section in sections.items():
        path = folder / f"{name}.json"
        content = section(json.loads(path.read_text())) if path.exists() else "Nothing has been stored yet."
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        text = re.sub(f"{start}.*?{end}", lambda _, c=content, s=start, e=end: f"{s}\n{c}\n{e}", text, flags=re.DOTALL)
    return text


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return update_page(PAGE, generate, __doc__, arguments, ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
