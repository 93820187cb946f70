"""Targets that hold sequences: prepared tokens, text to prepare, and the files of the Long Range Arena."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from fuzz.harness import ROOT, Harness, one_of_many


def tokens(folder: Path) -> Harness:
    """Folders of prepared tokens: the index, and the files that it lists."""
    from shutil import copytree

    from tost.data.tokens.reader import check_tokens, open_tokens

    prepared = copytree(ROOT / "tests" / "regression" / "tokens" / "chars", folder / "chars")

    def parse(_: Path) -> None:
        found = open_tokens(prepared)
        found.tokenizer()
        for name in found.splits:
            split = found.split(name)
            split.tokens[:10].sum()
            for number in range(min(3, len(split.documents) - 1)):
                split.document(number)
        check_tokens(prepared)

    names = ("index.json", "train-00000.lengths", "train-00001.bin")
    return one_of_many(prepared, names, parse, words=("splits", "shards", "tokens", "uint8", "uint32", "chars"))


def documents(folder: Path) -> Harness:
    """Files of text that are made into tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tost.data.text.corpora import TextOptions
    from tost.data.text.read import documents_of, find_sources

    pa.set_cpu_count(1)
    rows = [{"text": "One."}, {"text": "Zwei\u00e9"}]
    (folder / "a.txt").write_text("Some text.\n\nMore.")
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"packed", mtime=0))
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    names = ("a.txt", "a.jsonl", "a.txt.gz", "a.parquet")

    def parse(file: Path) -> None:
        job = TextOptions(source=str(file), tokenizer="chars").job()
        for document in documents_of(find_sources(job)["train"], job):
            "".join(document)

    return one_of_many(folder, names, parse, words=('{"text": "a"}\n', "text"))


def _use(bundle: Any) -> None:
    import torch

    for split in (bundle.train, bundle.validation):
        split.gather(torch.arange(min(2, len(split))))


def listops(folder: Path) -> Harness:
    """ListOps."""
    from tests.data.lra.files import write_listops
    from tost.data.lra.options import LraListOpsOptions
    from tost.data.lra.readers import build_listops

    write_listops(folder)
    options = LraListOpsOptions(length=16)
    words = ("[MAX ", "[MED ", "[SM ", "( ", ") ", "] ", "X ", "\t9\n")
    names = ("basic_train.tsv", "basic_val.tsv")
    return one_of_many(folder, names, lambda _: _use(build_listops(options, str(folder))), words=words)


def reviews(folder: Path) -> Harness:
    """The reviews of the text task, in folders and in parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tost.data.lra.options import LraTextOptions
    from tost.data.lra.readers import build_text

    pa.set_cpu_count(1)
    parquet, plain = folder / "parquet", folder / "plain"
    parquet.mkdir()
    for split in ("train", "test"):
        table = pa.table({"text": ["good", "b\u00e4d", ""], "label": [1, 0, 1]})
        pq.write_table(table, parquet / f"{split}.parquet", compression="none")
        for name in ("neg", "pos"):
            (plain / split / name).mkdir(parents=True)
            (plain / split / name / "0_1.txt").write_text("A film.")
    options = LraTextOptions(length=16)
    names = ("parquet/train.parquet", "plain/train/neg/0_1.txt", "plain/test/pos/0_1.txt")

    def parse(file: Path) -> None:
        _use(build_text(options, str(parquet if file.suffix == ".parquet" else plain)))

    return one_of_many(folder, names, parse)


def pairs(folder: Path) -> Harness:
    """The pairs of documents of the retrieval task."""
    from tests.data.lra.files import write_pairs
    from tost.data.lra.options import LraRetrievalOptions
    from tost.data.lra.readers import build_retrieval

    write_pairs(folder)
    options = LraRetrievalOptions(length=16)
    names = ("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv")
    words = ("1.0\t", "0.0\ta\tb\tc\td\n")
    return one_of_many(folder, names, lambda _: _use(build_retrieval(options, str(folder))), words=words)


def pathfinder(folder: Path) -> Harness:
    """Pathfinder's metadata and its images."""
    from tests.data.lra.files import write_pathfinder
    from tost.data.lra.options import LraPathfinderOptions
    from tost.data.lra.readers import build_pathfinder

    write_pathfinder(folder, batches=(0,), each=10)
    options = LraPathfinderOptions()
    names = [path.relative_to(folder).as_posix() for name in ("0.npy", "sample_0.png") for path in folder.rglob(name)]
    return one_of_many(
        folder, names, lambda _: _use(build_pathfinder(options, str(folder))), words=("imgs/0 ", "sample_0.png ")
    )
