"""Makes docs/distill.md from results/distill_minilm.json. No number is typed by hand.

python scripts/update_distill.py           rewrite docs/distill.md
python scripts/update_distill.py --check   only say whether it is up to date; exit code 1 if not

`scripts/measure_distill.py` stores the numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_file import ROOT, update_page

from tost._text import Table

__all__ = ["generate", "main"]

FILE = ROOT / "results" / "distill_minilm.json"
PAGE = ROOT / "docs" / "distill.md"
TEXT = """# What is left of a sentence encoder

`{model}` is a BERT of six layers that turns sentences into vectors. The attention of its last layers was
[replaced](replace.md) by TSSA and distilled for {steps[0]} steps block by block and {steps[1]} on the outputs, in
batches of {batch_size} lines of up to {length} tokens of WikiText-2: minutes on one core, a beginning and not the end.

{quality}

`agreement` is the rank correlation (Spearman) between the similarities that the original and the new model give to
all pairs of {passages} passages from {articles} articles that were not trained on. `same article` is how often the
passage nearest to another is from the same article. `before` is after replacing, without training. There is no set
of labelled sentence similarities on the machine that this was measured on, so these two stand in for one.

{verdict}
{time}
```console
$ python scripts/measure_distill.py --model FOLDER --train FILE --test FILE --out results/distill_minilm.json
$ python scripts/measure_distill.py --model FOLDER --out results/distill_minilm.json --time
$ python scripts/update_distill.py
```
"""
TIME = """
## Time

{seconds}

Milliseconds of a forward pass of one sequence, threads: {threads}, the shortest of three turns; ratios are to the
original. Beyond 512 tokens the encoder has no positions of its own, so they are repeated: the time is real, the
vectors mean nothing.
"""


def generate(file: Path = FILE) -> str:
    """Return the text of the page.

    Args:
        file: The stored numbers.
    """
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    found["quality"] = dict(sorted(found["quality"].items(), key=lambda item: (item[0] != "teacher", item[0])))
    time = ""
    if "seconds" in found:
        time = TIME.format(seconds=_seconds(found).markdown(), threads=found["threads"])
    return TEXT.format(**{**found, "quality": _quality(found).markdown(), "verdict": _verdict(found), "time": time})


def _quality(found: dict[str, Any]) -> Table:
    rows = []
    for name, numbers in found["quality"].items():
        before = numbers.get("untrained")
        rows.append(
            (
                "the original" if name == "teacher" else f"{name} replaced",
                "-" if before is None else f"{before['spearman']:.3f}",
                f"{numbers['spearman']:.3f}",
                "-" if before is None else f"{100 * before['same_article']:.1f} %",
                f"{100 * numbers['same_article']:.1f} %",
            )
        )
    return Table(headers=("", "agreement before", "agreement", "same article before", "same article"), rows=rows)


def _seconds(found: dict[str, Any]) -> Table:
    lengths = list(found["seconds"])
    rows = []
    for name in found["seconds"][lengths[0]]:
        cells = []
        for length in lengths:
            taken, original = (found["seconds"][length][which] for which in (name, "teacher"))
            cells += [f"{1000 * taken:,.0f}", f"{taken / original:.2f}"]
        rows.append(("the original" if name == "teacher" else f"{name} replaced", *cells))
    headers = [part for length in lengths for part in (f"{int(length):,} tokens", "ratio")]
    return Table(headers=("", *headers), rows=rows)


def _verdict(found: dict[str, Any]) -> str:
    kept = {name: numbers["same_article"] for name, numbers in found["quality"].items()}
    parts = [
        f"With {name} replaced, {100 * kept[name] / kept['teacher']:.0f} % of the original's retrieval is left and the "
        f"agreement is {found['quality'][name]['spearman']:.2f}."
        for name in kept
        if name != "teacher"
    ]
    return " ".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return update_page(PAGE, generate, __doc__, arguments, ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
