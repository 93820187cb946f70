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
[replaced](replace.md) by TSSA, with extensions where the table names them, and distilled in batches of {batch_size}
lines of up to {length} tokens of WikiText-2. Steps are those block by block and those on the outputs: minutes on one
core, a beginning and not the end.

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

Milliseconds of processor time of a forward pass of one sequence, threads: {threads}, the shortest of three turns;
ratios are to the original. Beyond 512 tokens the encoder has no positions of its own, so they are repeated: the time
is real, the vectors mean nothing.
"""


def generate(file: Path = FILE) -> str:
    """Return the text of the page.

    Args:
        file: The stored numbers.
    """
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    students = sorted(found["students"], key=lambda each: (each["layers"], each["steps"], str(each["extensions"])))
    sizes = {
        name: " or ".join(map(str, sorted({each[name] for each in students}))) for name in ("batch_size", "length")
    }
    time = ""
    if "processor_seconds" in found:
        time = TIME.format(seconds=_seconds(found).markdown(), threads=found["threads"])
    quality = _quality(found["teacher"], students).markdown()
    verdict = _verdict(found["teacher"], students)
    return TEXT.format(**{**found, **sizes, "quality": quality, "verdict": verdict, "time": time})


def _quality(teacher: dict[str, Any], students: list[dict[str, Any]]) -> Table:
    rows = [("the original", "", "", *_numbers(None), *_numbers(teacher))]
    for student in students:
        extensions = ", ".join(f"`{name}={json.dumps(value)}`" for name, value in student["extensions"].items())
        steps = " + ".join(f"{count:,}" for count in student["steps"])
        before, after = _numbers(student["untrained"]), _numbers(student)
        rows.append((_layers(student["layers"]), extensions, steps, *before, *after))
    pair = ("agreement", "same article")
    return Table(headers=("replaced", "extensions", "steps", *(f"{name} before" for name in pair), *pair), rows=rows)


def _numbers(measured: dict[str, Any] | None) -> tuple[str, str]:
    if measured is None:
        return "-", "-"
    return f"{measured['spearman']:.3f}", f"{100 * measured['same_article']:.1f} %"


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _seconds(found: dict[str, Any]) -> Table:
    lengths = list(found["processor_seconds"])
    rows = []
    for count in found["processor_seconds"][lengths[0]]:
        cells = []
        for length in lengths:
            taken, original = (found["processor_seconds"][length][which] for which in (count, "0"))
            cells += [f"{1000 * taken:,.0f}", f"{taken / original:.2f}"]
        rows.append(("the original" if count == "0" else f"{_layers(int(count))} replaced", *cells))
    headers = [part for length in lengths for part in (f"{int(length):,} tokens", "ratio")]
    return Table(headers=("", *headers), rows=rows)


def _verdict(teacher: dict[str, Any], students: list[dict[str, Any]]) -> str:
    parts = []
    for count in sorted({each["layers"] for each in students}):
        best = max((each for each in students if each["layers"] == count), key=lambda each: float(each["spearman"]))
        kept = 100 * best["same_article"] / teacher["same_article"]
        parts.append(
            f"With {_layers(count)} replaced, the student that agrees best has an agreement of {best['spearman']:.2f} "
            f"and {kept:.0f} % of the original's retrieval."
        )
    return "\n".join(f"- {part}" for part in parts)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return update_page(PAGE, generate, __doc__, arguments, ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
