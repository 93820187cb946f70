"""Makes docs/lengths.md from results/lengths.json and the newest `tost bench length`. No number is typed by hand.

python scripts/update_lengths.py           rewrite docs/lengths.md
python scripts/update_lengths.py --check   only say whether it is up to date; exit code 1 if not

`scripts/measure_lengths.py` and `tost bench length --out benchmarks/results` store the numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_file import ROOT, newest, update_page

from tost._text import Table
from tost.bench.harness.report import Report
from tost.bench.length.run import LengthMeasurement, LengthResults

__all__ = ["generate", "main"]

FILE = ROOT / "results" / "lengths.json"
PAGE = ROOT / "docs" / "lengths.md"
TEXT = """# Longer than trained

The models of [`tost sweep language_positions`](results.md), trained on windows of {trained} characters, read longer
ones: the loss on the last {trained} characters of each window (all of the first) of a part of the validation text, in
nats, the mean over {seeds} seeds.

{table}

`learned` has a vector per position and a bias per head and position; beyond the last one all tokens share it
(`after_last_position=repeat`), without which such windows are refused. `none` has neither and needs no rule. The state
is of constant size, so reading on costs no more per token.

```console
$ tost sweep language_positions data.path=DATA --out runs/language_positions
$ python scripts/measure_lengths.py --runs runs/language_positions --out results/lengths.json
$ python scripts/update_lengths.py
```
"""
STEPS = """
## Training on one long sequence

`model.loss(ids, targets, chunk=...)` and `train.chunk` take a sequence in pieces. Gradients are those of the whole,
since they flow through the states, and memory is that of one piece plus the states. Below is one step, forward and
backward, of models with {depth} layers of width {width} on bytes in pieces of {chunk:,} tokens, each point in a process
of its own. Memory goes back to the system as soon as it is free there, which takes time.

{findings}

{tables}

```console
{command}
```
"""


def generate(file: Path = FILE) -> str:
    """Return the text of the page.

    Args:
        file: The stored numbers.
    """
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["loss"]
    lengths = list(next(iter(found.values())))
    rows = [(f"`{arm}`", *(_cell(numbers[length]) for length in lengths)) for arm, numbers in found.items()]
    headers = ("", *(f"{int(length):,}" for length in lengths))
    seeds = min(numbers[length]["seeds"] for numbers in found.values() for length in lengths)
    text = TEXT.format(trained=lengths[0], seeds=seeds, table=Table(headers=headers, rows=rows).markdown())
    # A run at the full width takes an idle machine for half an hour; a narrower one stands in for it.
    stored = newest("length") or newest("length-selection")
    return text if stored is None else text + _steps(stored)


def _steps(file: Path) -> str:
    report = Report.from_json(json.loads(file.read_text(encoding="utf-8")), LengthResults)
    tables = [
        "\n\n".join((f"### {table.title}", table.markdown(), "\n".join(f"- {note}" for note in table.notes))).strip()
        for table in LengthMeasurement.tables(report.results)
    ]
    return STEPS.format(
        **report.about["scale"],
        findings="\n".join(f"- {sentence}" for sentence in LengthMeasurement.findings(report.results)),
        tables="\n\n".join(tables),
        command=f"$ {report.command}",
    )


def _cell(numbers: dict[str, Any]) -> str:
    spread = "" if numbers["std"] is None else f" ± {numbers['std']:.3f}"
    return f"{numbers['mean']:.3f}{spread}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return update_page(PAGE, generate, __doc__, arguments, ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
