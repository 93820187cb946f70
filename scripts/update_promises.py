"""Fills docs/promises.md with the stored results of `scripts/stress`, of the fuzzer and of the sanitizers.

python scripts/update_promises.py           rewrite the numbers
python scripts/update_promises.py --check   only say whether they are up to date; exit code 1 if not
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page_file import ROOT, update_page
from stress.record import summed
from update_readme import updated

from tost._text import duration, grouped, number

__all__ = ["generate", "main"]

RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "promises.md"
SANITIZERS = {"address": "AddressSanitizer and UndefinedBehaviorSanitizer", "thread": "ThreadSanitizer"}


def stress_section(results: Mapping[str, Any]) -> str:
    """Return what was done to runs and commands."""
    total, scenarios = summed(results), results["scenarios"]
    wrong = ", ".join(f"`{name}`" for name, found in sorted(scenarios.items()) if found["differences"])
    return (
        f"{number(total['kills'])} kills and {number(total['disturbances'])} other disturbances in "
        f"{len(scenarios)} scenarios, {number(total['compared'])} comparisons with an undisturbed run, "
        f"{number(total['differences'])} differences{f' in {wrong}' if wrong else ''} "
        f"(tost {results['tost']}, {results['cpu']}, {results['date']}; each scenario in `results/stress.json`)."
    )


def fuzz_section(results: Mapping[str, Any]) -> str:
    """Return what was fed to parsers."""
    targets = results["targets"]
    sums = {key: sum(target[key] for target in targets) for key in ("inputs", "seconds", "problems")}
    wrong = ", ".join(f"`{target['name']}`" for target in targets if target["problems"])
    return (
        f"{number(sums['inputs'])} inputs to {number(len(targets))} parsers in {duration(sums['seconds'])} "
        f"of processor time, {number(sums['problems'])} problems{f' in {wrong}' if wrong else ''} "
        f"(tost {results['tost']}, {results['date'][:10]}; each parser in `results/fuzz.json`)."
    )


def sanitize_section(results: Mapping[str, Any]) -> str:
    """Return what the sanitizers found."""
    lines = []
    for name, runs in grouped(results["runs"], lambda run: run["sanitizer"]).items():
        tests, problems = (sum(run[key] for run in runs) for key in ("tests", "problems"))
        sets = ", ".join(f"`{run['isa']}`" for run in runs)
        lines.append(f"{SANITIZERS[name]}: {number(tests)} tests on {sets}, {number(problems)} problems.")
    return " ".join([*lines, f"(tost {results['tost']}, {results['date']}.)"])


def generate(folder: Path = RESULTS, page: Path = PAGE) -> str:
    """Return the text of the page.

    Args:
        folder: Where the stored results are.
        page: The page as it is now; what stands between its markers is replaced.
    """
    sections = {"stress": stress_section, "fuzz": fuzz_section, "sanitize": sanitize_section}
    stored = {name: json.loads((folder / f"{name}.json").read_text()) for name in sections}
    return updated(page.read_text(encoding="utf-8"), {name: sections[name](stored[name]) for name in sections})


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return update_page(PAGE, generate, __doc__, arguments, ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
