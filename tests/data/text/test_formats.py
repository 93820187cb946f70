"""Every format that text is read from gives the same documents; what cannot be read is refused by name."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma

import pytest

from tests.data.images.files import tar_of
from tests.data.text.samples import DOCUMENTS, all_tokens, make, texts
from tost.data.prepare import prepare
from tost.errors import ConfigError

ROWS = [{"text": text, "id": str(number)} for number, text in enumerate(DOCUMENTS)]


def table(delimiter):
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, ["text", "id"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return stream.getvalue().encode()


def zstandard(data):
    import pyarrow as pa

    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as packer:
        packer.write(data)
    return stream.getvalue().to_pybytes()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FILES = {
    "a.csv": table(","),
    "bom.csv": b"\xef\xbb\xbf" + table(","),
    "a.tsv": table("\t"),
    "a.csv.gz": gzip.compress(table(",")),
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "nested.json": json.dumps({"version": 1, "data": ROWS}).encode(),
    "lines.json": LINES,
    "a.jsonl": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "bom.json": b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
    "a.JSONL.GZ": gzip.compress(LINES),
    "a.jsonl.xz": lzma.compress(LINES),
    "a.jsonl.zst": zstandard(LINES),
    "a.tar": tar_of({f"{number:03d}.txt": text.encode() for number, text in enumerate(DOCUMENTS)}),
    "b.tar": tar_of({f"{number:03d}.json": json.dumps(row).encode() for number, row in enumerate(ROWS)}),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    folder = make(tmp_path / "out", source=str(tmp_path / name), validation=0)
    assert texts(folder) == DOCUMENTS
    assert bytes(all_tokens(folder)) == "".join(f"{text}\n" for text in DOCUMENTS).encode(), "documents are separated"


def test_folders_of_datasets(tmp_path):
    import datasets

    data = datasets.Dataset.from_dict({"text": DOCUMENTS})
    data.save_to_disk(str(tmp_path / "one"))
    assert texts(make(tmp_path / "a", source=str(tmp_path / "one"), validation=0)) == DOCUMENTS
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(str(tmp_path / "two"))
    folder = make(tmp_path / "b", source=str(tmp_path / "two"), split="named")
    assert (texts(folder), texts(folder, "test")) == (DOCUMENTS, DOCUMENTS[:1])


REFUSED = {
    "a.cvs": (
        b"text\nx\n",
        r"the ending '\.cvs' is not known; did you mean '\.csv'\? files are known",
    ),
    "a.bin": (b"\0\1", r"the ending '\.bin' is not known; .*If it is plain text, add format=text"),
    "a.tar.gz": (b"", r"the ending '\.tar\.gz' is not known"),
    "README": (b"words", "is not known"),
    "a.csv": (b"body,id\nx,1\n", r"a\.csv has no column 'text'; its columns are: body, id\. Set column"),
    "typo.csv": (b"texts,id\nx,1\n", "did you mean 'texts'"),
    "twice.csv": (b"text,text\nx,y\n", "has the column 'text' 2 times; rename all but one"),
    "semicolon.csv": (b"text;id\nx;1\n", "They seem to be separated by ';'. Convert it"),
    "tab.csv": (b"text\tid\nx\t1\n", "They seem to be separated by .*Add format=tsv"),
    "comma.tsv": (b"text,id\nx,1\n", "They seem to be separated by ','. Add format=csv"),
    "header.csv": (b"text,id\n", "holds no documents"),
    **{
        f"wide.{ending}": ("text\n".encode("utf-16"), "begins as UTF-16 does, but text is read as UTF-8; convert it")
        for ending in ("txt", "csv", "json", "jsonl")
    },
    "wide.txt.gz": (gzip.compress("text\n".encode("utf-16")), "begins as UTF-16 does"),
    "short.csv": (b"text,id\nx\n", r"line 2: not a row of a table \(it has 1 fields, but the first line names 2"),
    "blank.csv": (b"\n\n", r"line 2: not a row of a table \(the first line names no columns\)"),
    "quote.csv": (b'text\n"open\n', "not a row of a table"),
    "a.tsv": (b"body\tid\nx\t1\n", r"a\.tsv has no column 'text'; its columns are: body, id\. Set column"),
    "empty.csv": (b"", "holds no documents"),
    "empty.tsv": (b"", "holds no documents"),
    "empty.tar": (tar_of({}), "holds no documents"),
    "empty.jsonl.zst": (zstandard(b""), "holds no documents"),
    "empty.json": (b"", "holds no documents"),
    "empty.xz.jsonl": (b"", "holds no documents"),
    "a.json": (b'[{"body": "x"}]', r"entry 1: has no key 'text'; its keys are: body"),
    "b.json": (b"[1, 2]", "entry 1: holds a int, not an object"),
    "c.json": (b"[" * 100_000, "not valid JSON"),
    "packed.jsonl.gz": (gzip.compress(b'{"body": "x"}\n'), r"line 1: has no key 'text'; its keys are: body"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "not valid JSON"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n{"text": "b"}\n', "half of a character"),
    "a.jsonl.xz": (b"no xz", "is damaged or not complete"),
    "a.jsonl.zst": (b"no zstandard", "is damaged or not complete"),
    "a.tar": (tar_of({"a.jpg": b"x"}), "holds no documents"),
    "b.tar": (tar_of({"a.json": b"{}"}), "has no key 'text'"),
    "cut.tar": (tar_of({"a.txt": b"x"})[:700], "cannot be read as a tar file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(tmp_path, name):
    content, said = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        prepare("text", {"source": str(tmp_path / name), "validation": 0}, tmp_path / "out")


def test_encodings(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text\nna\xefve\nplain\n")
    options = {"source": str(tmp_path / "a.csv"), "validation": 0}
    with pytest.raises(ConfigError, match=r"a\.csv: byte 0xef is not UTF-8; convert the file, or use tokenizer=bytes"):
        prepare("text", {**options, "tokenizer": "chars"}, tmp_path / "out")
    assert bytes(all_tokens(make(tmp_path / "out", **options))) == b"na\xefve\nplain\n"


def test_files_of_several_encodings(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes("naïve\n".encode())
    (tmp_path / "in" / "b.txt").write_bytes("naïve\n".encode("latin-1"))
    options = {"source": str(tmp_path / "in"), "validation": 0}
    with pytest.raises(ConfigError, match=r"b\.txt: byte 0xef is not UTF-8; convert the file, or use tokenizer=bytes"):
        prepare("text", {**options, "tokenizer": "chars"}, tmp_path / "out")


def test_folders_of_datasets_that_cannot_be_read(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"body": DOCUMENTS}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="has no column 'text'; its columns are: body"):
        make(tmp_path / "out", source=str(tmp_path / "other"), validation=0)
    datasets.Dataset.from_dict({"text": []}).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"holds no documents|it is empty or damaged"):
        make(tmp_path / "out", source=str(tmp_path / "empty"), validation=0)


def test_a_table_called_something_else(tmp_path):
    (tmp_path / "table.dat").write_bytes(table("\t"))
    options = {"source": str(tmp_path / "table.dat"), "format": "tsv", "validation": 0}
    assert texts(make(tmp_path / "out", **options)) == DOCUMENTS


def test_a_format_can_be_given(tmp_path):
    (tmp_path / "notes.md").write_text("# Notes\n")
    assert texts(make(tmp_path / "out", source=str(tmp_path / "notes.md"), format="text", validation=0)) == [
        "# Notes\n"
    ]


def test_a_tokenizer_that_is_not_there_is_said_at_once(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tost.data.text.tokenizers._cached", lambda repository: None)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"not on this machine, and HF_HUB_OFFLINE is set"):
        prepare("text", {"source": str(tmp_path / "a.txt"), "tokenizer": "gpt2"}, tmp_path / "out")
