"""Preparing text: the same tokens from every format, for any number of workers, and after an interruption."""

from __future__ import annotations

import errno
import json
import math

import numpy as np
import pytest

from tests.data.text.samples import (
    DOCUMENTS,
    all_tokens,
    contents,
    load_from_memory,
    make,
    texts,
    write_jsonl,
    write_parquet,
    write_text_files,
    write_tokenizer,
)
from tost._io import DRAFT_PREFIX
from tost.data.prepare import check_folder, find_preparer, list_preparers, prepare
from tost.data.text import prepare as text_prepare
from tost.data.text import read as text_read
from tost.errors import ConfigError, StorageError


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "source.jsonl")


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_every_format_gives_the_same_tokens(tmp_path, monkeypatch, tokenizer):
    options = {
        "tokenizer": str(write_tokenizer(tmp_path / "bpe")) if tokenizer == "bpe" else tokenizer,
        "validation": 0.2,
    }
    load_from_memory(monkeypatch, train=DOCUMENTS)
    sources = {
        "txt": write_text_files(tmp_path / "files"),
        "jsonl": write_jsonl(tmp_path / "a.jsonl"),
        "gz": write_jsonl(tmp_path / "b.jsonl.gz"),
        "parquet": write_parquet(tmp_path / "c.parquet"),
        "folder": write_parquet(tmp_path / "d" / "e" / "f.parquet").parents[1],
        "hub": "hub:some/name",
    }
    made = {kind: make(tmp_path / "out" / kind, source=str(source), **options) for kind, source in sources.items()}
    expected = made["txt"]
    assert sorted(texts(expected) + texts(expected, "validation")) == sorted(DOCUMENTS)
    for folder in made.values():
        assert folder.fingerprint == expected.fingerprint
        for split in ("train", "validation"):
            assert all_tokens(folder, split) == all_tokens(expected, split)
            assert folder.split(split).num_bytes == sum(len(text.encode()) for text in texts(expected, split))
            assert folder.split(split).source_words == sum(len(text.split()) for text in texts(expected, split))


def test_split_is_that_of_the_datasets_library(tmp_path, source):
    from datasets import Dataset

    folder = make(tmp_path / "out", source=str(source), validation=0.13, seed=2357)
    parts = Dataset.from_dict({"text": DOCUMENTS}).train_test_split(test_size=0.13, seed=2357)
    assert sorted(texts(folder, "validation")) == sorted(parts["test"]["text"])
    assert len(texts(folder, "validation")) == math.ceil(0.13 * len(DOCUMENTS))
    assert texts(folder) == [text for text in DOCUMENTS if text in set(parts["train"]["text"])]


def test_end_of_text_follows_every_document(tmp_path, source):
    tokenizer = str(write_tokenizer(tmp_path / "bpe"))
    folder = make(tmp_path / "out", source=str(source), tokenizer=tokenizer, validation=0)
    split = folder.split("train")
    assert folder.splits == ("train",)
    assert folder.end_of_text == 0
    ends = split.documents[1:] - 1
    assert np.flatnonzero(np.asarray(split.tokens[:]) == folder.end_of_text).tolist() == ends.tolist()
    without = make(tmp_path / "none", source=str(source), tokenizer=tokenizer, validation=0, end_of_text="none")
    assert len(without.split("train").tokens) == split.num_tokens - len(DOCUMENTS)
    assert texts(without) == texts(folder) == DOCUMENTS


def test_workers_and_shards_do_not_change_the_tokens(tmp_path, source):
    tokenizer = str(write_tokenizer(tmp_path / "bpe"))
    one = make(tmp_path / "one", source=str(source), shard_bytes=200, tokenizer=tokenizer)
    two = make(tmp_path / "two", source=str(source), shard_bytes=200, tokenizer=tokenizer, workers=2)
    whole = make(tmp_path / "whole", source=str(source), tokenizer=tokenizer)
    assert len(one.index.splits["train"].shards) > 3
    assert contents(one.path) == contents(two.path)
    for split in ("train", "validation"):
        assert all_tokens(whole, split) == all_tokens(one, split)
        assert np.array_equal(whole.split(split).documents, one.split(split).documents)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_long_text_is_read_in_pieces(tmp_path, monkeypatch, tokenizer):
    chosen = str(write_tokenizer(tmp_path / "bpe")) if tokenizer == "bpe" else tokenizer
    text = "\n".join(DOCUMENTS)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    whole = make(tmp_path / "whole", source=str(tmp_path / "a.txt"), tokenizer=chosen, validation=0.3)
    monkeypatch.setattr(text_read, "_BLOCK", 7)
    monkeypatch.setattr(text_prepare, "_CHUNK", 20)
    monkeypatch.setattr(text_prepare, "_BATCH", 50)
    pieces = make(tmp_path / "pieces", source=str(tmp_path / "a.txt"), tokenizer=chosen, validation=0.3)
    assert contents(whole.path) == contents(pieces.path)
    place = int(len(text) * 0.7)
    for split, part in (("train", text[:place]), ("validation", text[place:])):
        assert texts(pieces, split) == [part]
        assert pieces.split(split).source_words == len(part.split())
        assert pieces.split(split).num_bytes == pieces.split(split).source_bytes == len(part.encode())


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_interrupted_anywhere_it_ends_with_the_same_bytes(tmp_path, source, tokenizer):
    options = {"source": str(source), "shard_bytes": 200, "tokenizer": tokenizer}
    calls = []
    expected = contents(make(tmp_path / "whole", report=lambda *call: calls.append(call), **options).path)
    assert calls[-1][0] == calls[-1][1] == len(DOCUMENTS)
    for stop in range(1, len(calls) + 1):
        left = iter(range(stop))

        def report(*call, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt

        out = tmp_path / f"stopped{stop}"
        try:
            prepare("text", options, out, report=report)
        except KeyboardInterrupt:
            assert not (out / "index.json").exists()
            assert not list(out.rglob(f"{DRAFT_PREFIX}*")), "a file that is not complete was left behind"
        make(out, **options)
        assert contents(out) == expected


def interrupt_after(count):
    left = iter(range(count))

    def report(*call):
        if next(left, None) is None:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("is_damaged", [False, True])
def test_complete_shards_are_kept(tmp_path, source, is_damaged):
    options = {"source": str(source), "shard_bytes": 200}
    whole = contents(make(tmp_path / "whole", **options).path)
    with pytest.raises(KeyboardInterrupt):
        prepare("text", options, tmp_path / "out", report=interrupt_after(6))
    done = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "out").glob("train-*"))}
    assert len(done) == 6
    if is_damaged:  # as a machine that lost power might leave it
        victim = tmp_path / "out" / "train-00001.bin"
        victim.write_bytes(victim.read_bytes()[:-1])
    make(tmp_path / "out", **options)
    kept = [path for path in done if path.stat().st_mtime_ns == done[path]]
    assert kept == ([] if is_damaged else list(done))
    assert contents(tmp_path / "out") == whole


def test_a_full_disk_can_be_mended(tmp_path, source, monkeypatch):
    options = {"source": str(source), "shard_bytes": 200}
    expected = contents(make(tmp_path / "whole", **options).path)

    def is_full(path, original=text_prepare.atomic_path):
        if path.name == "train-00001.bin":
            raise OSError(errno.ENOSPC, "No space left on device", path.name)
        return original(path)

    with monkeypatch.context() as patch:
        patch.setattr(text_prepare, "atomic_path", is_full)
        with pytest.raises(StorageError, match=r"train-00001\.bin: No space left on device; what is done is kept"):
            prepare("text", options, tmp_path / "out")
    assert (tmp_path / "out" / "train-00000.bin").is_file()
    make(tmp_path / "out", **options)
    assert contents(tmp_path / "out") == expected


def test_an_interrupted_preparation_finds_the_same_source(tmp_path, source):
    options = {"source": str(source), "shard_bytes": 200}
    with pytest.raises(KeyboardInterrupt):
        prepare("text", options, tmp_path / "out", report=interrupt_after(4))
    plan = tmp_path / "out" / "work" / "plan.json"
    before = plan.read_text()
    plan.write_text(json.dumps(["bytes", [], [], {}]))  # as an earlier version wrote it
    with pytest.raises(ConfigError, match="the version of tost is not what it was"):
        prepare("text", options, tmp_path / "out")
    plan.write_text(before)
    write_jsonl(source, [*DOCUMENTS, "one more"])
    with pytest.raises(ConfigError, match="the source, the tokenizer or the version of tost is not what it was"):
        prepare("text", options, tmp_path / "out")


@pytest.mark.parametrize("documents", [[*DOCUMENTS, "one more"], DOCUMENTS[:-1]])
def test_a_source_that_changes_while_it_is_read_is_an_error(tmp_path, source, documents):
    def report(done, total, what):
        if what == "tokenizing" and done == 0:
            write_jsonl(source, documents)

    with pytest.raises(StorageError, match="has changed while it was read"):
        prepare("text", {"source": str(source), "validation": 0}, tmp_path / "out", report=report)


def test_other_content_is_left_alone(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("important")
    with pytest.raises(ConfigError, match=r"holds something else \(thesis\.tex\)"):
        make(out, source=str(source))
    assert list(contents(out)) == ["thesis.tex"]
    with pytest.raises(ConfigError, match="is a file"):
        make(source, source=str(source))
    make(tmp_path / "made", source=str(source))
    with pytest.raises(ConfigError, match=r"other settings \(validation was 0.01 and is 0.5\)"):
        make(tmp_path / "made", source=str(source), validation=0.5)


def test_only_prepared_folders_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"no prepare\.json"):
        check_folder(tmp_path)


def test_index_says_everything(tmp_path, source):
    folder = make(tmp_path / "out", source=str(source))
    before = contents(folder.path)
    assert prepare("text", {"source": str(source)}, folder.path)["already there"] is True
    assert contents(folder.path) == before
    index = json.loads((folder.path / "index.json").read_text(encoding="utf-8"))
    assert index["format"] == "tost-tokens"
    assert index["dtype"] == "uint8"
    assert index["source"] == [{"file": "source.jsonl", "split": "train", "size": source.stat().st_size}]
    assert index["settings"]["split"] == {"rule": "random", "validation": 0.01, "seed": 0}
    assert str(tmp_path) not in json.dumps(index)


def test_every_option_is_described():
    for preparer in map(find_preparer, list_preparers()):
        assert preparer.summary
        assert all(field.description for field in preparer.model_fields.values()), preparer.name
        assert preparer.model_config["extra"] == "forbid"
