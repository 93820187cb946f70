"""Makes docs/lengths.md from results/lengths.json. No number is typed by hand.

python scripts/update_lengths.py           rewrite docs/lengths.md
python scripts/update_lengths.py --check   only say whether it is up to date; exit code 1 if not

`scripts/measure_lengths.py` stores the numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_file import ROOT, update_page

from tost._text import Table

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
    return TEXT.format(trained=lengths[0], seeds=seeds, table=Table(headers=headers, rows=rows).markdown())


def _cell(numbers: dict[str, Any]) -> str:
    spread = "" if numbers["std"] is None else f" ± {numbers['std']:.3f}"
    return f"{numbers['mean']:.3f}{spread}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return update_page(PAGE, generate, __doc__, arguments, ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
