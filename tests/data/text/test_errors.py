"""Preparing text: what can be wrong, and what is said about it."""

from __future__ import annotations

import errno

import pytest

from tests.data.text.samples import contents, make, write_jsonl, write_parquet
from tests.data.text.test_prepare import load_from_memory
from tost.data.prepare import check_folder, find_preparer, prepare
from tost.data.text import pieces as text_pieces
from tost.errors import ConfigError, StorageError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def fails(tmp_path, match, name="text", **options):
    with pytest.raises(ConfigError, match=match):
        prepare(name, {"tokenizer": "bytes", **options}, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n\n{"text": "b"\n', r"bad\.jsonl, line 3: not valid JSON"),
        ('{"text": "a"}\n["text"]\n', r"bad\.jsonl, line 2: holds a list"),
        ('{"text": "a"}\n{"body": "b", "id": 1}\n', r"line 2: has no key 'text'; its keys are: body, id"),
        ('{"text": "a"}\n{"text": 7}\n', r"'text' holds int where a text is needed"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: byte 0xff is not UTF-8"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [1, 1 << 20])
def test_a_bad_line_is_named(tmp_path, content, said, shard_bytes):
    # Line numbers count from the beginning of the file, wherever a process starts to read.
    source = write(tmp_path / "bad.jsonl", content)
    with pytest.raises(ConfigError, match=said):
        prepare("text", {"source": source, "tokenizer": "chars", "shard_bytes": shard_bytes}, tmp_path / "out")


def test_a_bad_line_is_named_by_another_process(tmp_path):
    source = write(tmp_path / "bad.jsonl", '{"text": "a"}\n' * 9 + "{\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 10: not valid JSON"):
        prepare("text", {"source": source, "shard_bytes": 40}, tmp_path / "out", workers=2)


def test_missing_columns_name_those_that_exist(tmp_path, monkeypatch):
    source = write_parquet(tmp_path / "a.parquet", ["x", "y", "z"], column="body")
    fails(tmp_path, r"a\.parquet has no column 'text'; its columns are: body, id", source=str(source))
    load_from_memory(monkeypatch, train={"body": ["x", "y"]})
    fails(tmp_path, "has no column 'text'; its columns are: body", source="hub:any/thing")


def test_null_is_no_text(tmp_path):
    source = write_parquet(tmp_path / "a.parquet", ["x", None, "z"])
    fails(tmp_path, "'text' holds nothing where a text is needed", source=str(source))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "", "holds no documents|no text at all|too few"),
        ("a.jsonl", "\n\n", "holds no documents"),
        ("a.jsonl", '{"text": ""}\n{"text": ""}\n', "no text at all"),
        ("a.parquet", "no parquet", "cannot be read as a parquet file"),
        ("a.jsonl.gz", "no gzip", "is damaged or not complete"),
        ("a.txt", "x", "1 characters, too few"),
    ],
)
def test_sources_without_text(tmp_path, name, content, said):
    fails(tmp_path, said, source=write(tmp_path / name, content))


def test_missing_sources(tmp_path):
    fails(tmp_path, "nowhere does not exist", source=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    fails(tmp_path, "holds no text; files are known by their endings", source=str(tmp_path / "empty"))
    fails(tmp_path, "text needs a source")
    fails(tmp_path, "input.txt", name="shakespeare")


def test_splits_that_are_not_there(tmp_path):
    source = write(tmp_path / "somefile.txt", "a line\n")
    fails(tmp_path, "has the splits: none by its names; need train or validation", name="ptb", source=source)
    made = make(tmp_path / "made", "ptb", source=source, tokenizer="bytes", splits="test")
    with pytest.raises(ConfigError, match="has no split 'train'; it has: test"):
        made.split("train")
    source = write_jsonl(tmp_path / "train.jsonl", ["a b"])
    fails(tmp_path, "has the splits: train; need test", name="lambada", source=str(source))


def test_text_that_is_not_utf8_is_read_as_bytes_only(tmp_path):
    content = b"na\xefve \xff\n" * 50
    source = write(tmp_path / "latin.txt", content)
    fails(tmp_path, r"latin\.txt: byte 0xef is not UTF-8", source=source, tokenizer="chars")
    folder = make(tmp_path / "bytes", source=source)
    read = bytes(folder.split("train").tokens[:]) + bytes(folder.split("validation").tokens[:])
    assert read == content
    assert folder.split("train").num_bytes == folder.split("train").num_tokens


def test_wrong_options(tmp_path):
    source = write(tmp_path / "a.txt", "text")
    fails(tmp_path, r"tokeniser: unknown key; did you mean tokenizer\?", source=source, tokeniser="bytes")
    fails(tmp_path, "validation: lots given; needs a number >= 0 and < 1", source=source, validation="lots")
    fails(tmp_path, "no tokenizer 'what'", source=source, tokenizer="what")
    fails(tmp_path, "leaves none for training", source=source, split="random")
    with pytest.raises(ConfigError, match="did you mean 'wikitext2'"):
        find_preparer("wikitxt2")


def test_a_mistake_leaves_the_folder_free(tmp_path):
    fails(tmp_path, "does not exist", source=str(tmp_path / "a.txt"))
    make(tmp_path / "out", source=write(tmp_path / "a.txt", "some text\n" * 40))


def test_other_content_is_left_alone(tmp_path):
    source = write(tmp_path / "a.txt", "some text\n" * 40)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("important")
    fails(tmp_path, r"holds something else \(thesis\.tex\)", source=source)
    assert list(contents(out)) == ["thesis.tex"]
    with pytest.raises(ConfigError, match="is a file"):
        prepare("text", {"source": source}, tmp_path / "a.txt")
    make(tmp_path / "made", source=source)
    with pytest.raises(ConfigError, match=r"other settings \(validation was 0.01 and is 0.5\)"):
        prepare("text", {"source": source, "validation": 0.5}, tmp_path / "made")


def test_a_full_disk_is_told_and_can_be_mended(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {number}" for number in range(30)])
    options = {"source": str(source), "shard_bytes": 100}
    expected = contents(make(tmp_path / "whole", **options).path)
    written = []

    def add(self, ids, original=text_pieces.ShardWriter.add):
        written.append(ids)
        if len(written) == 20:
            raise OSError(errno.ENOSPC, "No space left on device", "train-00001.bin")
        original(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(text_pieces.ShardWriter, "add", add)
        with pytest.raises(StorageError, match=r"train-00001\.bin: No space left on device; what is done is kept"):
            prepare("text", options, tmp_path / "out")
    make(tmp_path / "out", **options)
    assert contents(tmp_path / "out") == expected


def test_the_hub_is_not_reached(tmp_path, monkeypatch):
    import datasets

    def load(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("tost.data._hub.unreachable", lambda: "")
    fails(tmp_path, "cannot be loaded from the hub: no route; give --source", name="openwebtext")
    monkeypatch.setattr("tost.data._hub.unreachable", lambda: "there is no network")
    fails(tmp_path, "not on this machine, and there is no network; give --source", name="openwebtext")


def test_only_prepared_folders_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"no prepare\.json"):
        check_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"no prepare\.json"):
        check_folder(tmp_path / "nowhere")
