"""Small corpora and a small tokenizer, written by the tests themselves."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np

from tost.data.prepare import prepare
from tost.data.tokens.reader import open_tokens

DOCUMENTS = [
    "The ship didn't sink.\nIt floats, says the crew.",
    "",
    "Na\u00efve \u201cquotes\u201d and an \U0001f642: 12345.",
    "<|endoftext|> is a word here.",
    "  spaces \n\n in front\tand behind  ",
    *(f"Document number {number} tells of {number * number} whales.\nThe end." for number in range(20)),
]


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    return tokenizer.to_str()


def write_tokenizer(folder: Path) -> Path:
    """Write ``tokenizer.json`` of a small byte-pair encoding, GPT-2's kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained(), encoding="utf-8")
    return folder


def write_pairs(folder: Path) -> Path:
    """Write the same as ``vocab.json`` and ``merges.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads(_trained())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return folder


def write_text_files(folder: Path, documents=DOCUMENTS) -> Path:
    folder.mkdir(parents=True)
    for number, text in enumerate(documents):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


def write_jsonl(path: Path, documents=DOCUMENTS, column="text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({column: text, "id": number}) + "\n" for number, text in enumerate(documents))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode(), mtime=0))
    else:
        path.write_text(content, encoding="utf-8")
    return path


def write_parquet(path: Path, documents=DOCUMENTS, column="text", rows=3) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({column: list(documents), "id": list(range(len(documents)))})
    pq.write_table(table, path, row_group_size=rows)
    return path


def make(out: Path, name="text", workers=1, report=None, **options):
    """Prepare, and open what was made."""
    prepare(name, options, out, workers=workers, report=report)
    return open_tokens(out)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def texts(folder, split="train") -> list[str]:
    """The documents of a split, decoded."""
    tokens = folder.split(split)
    tokenizer = folder.tokenizer()
    return [tokenizer.decode(tokens.document(number).tolist()) for number in range(len(tokens.documents) - 1)]


def all_tokens(folder, split="train") -> list[int]:
    tokens = folder.split(split).tokens
    return np.asarray(tokens[:]).tolist()


def load_from_memory(monkeypatch, **splits):
    """Let the hub be a few documents in memory."""
    import datasets

    columns = {name: {"text": found} if isinstance(found, list) else found for name, found in splits.items()}
    asked = []

    def load(name, config, *, revision):
        asked.append((name, config, revision))
        return {name: datasets.Dataset.from_dict(found) for name, found in columns.items()}

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked
