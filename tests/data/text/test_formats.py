"""Every format that text is read from gives the same documents; what cannot be read is an error by name."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pytest

from tests.data.samples import limited
from tests.data.text.samples import DOCUMENTS, all_tokens, load_from_memory, make, texts
from tost.data.prepare import prepare
from tost.data.text.corpora import TextOptions
from tost.data.text.read import documents_of, find_sources
from tost.errors import ConfigError

ROWS = [{"text": text, "id": str(number)} for number, text in enumerate(DOCUMENTS)]


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FILES = {
    "a.jsonl": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "a.JSONL.GZ": gzip.compress(LINES),
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


def parquet(**columns):
    import pyarrow.parquet as pq

    stream = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue().to_pybytes()


NOT_UTF8 = r"byte 0xef after b.*na. is not UTF-8; convert the file, or use tokenizer=bytes"
REFUSED = {
    "a.jsnl": (b"x\n", r"the ending '\.jsnl' is not known; did you mean '\.jsonl'\? files are known"),
    "a.csv": (b"text\nx\n", r"the ending '\.csv' is not known; .*folder of save_to_disk"),
    "a.bin": (b"\0\1", r"the ending '\.bin' is not known; .*If it is plain text, add format=text"),
    "a.parquet.gz": (b"", r"the ending '\.parquet\.gz' is not known"),
    "README": (b"words", "is not known"),
    "empty.txt": (b"", "no text at all"),
    "latin.txt": ("na\u00efve\n".encode("latin-1"), rf"latin\.txt: {NOT_UTF8}"),
    "wide.txt": ("text\n".encode("utf-16"), "begins as UTF-16 does, but text is read as UTF-8; convert it"),
    "wide.txt.gz": (gzip.compress("text\n".encode("utf-16")), "begins as UTF-16 does"),
    "blank.jsonl": (b"\n\n", "holds no documents"),
    "cut.jsonl": (b'{"text": "a"}\n\n{"text": "b"\n', r"cut\.jsonl, line 3: not valid JSON"),
    "list.jsonl": (b'{"text": "a"}\n["text"]\n', r"list\.jsonl, line 2: holds a list"),
    "key.jsonl": (
        b'{"text": "a"}\n{"body": "b", "id": 1}\n',
        r"line 2 has no column 'text'; its columns are: body, id",
    ),
    "number.jsonl": (b'{"text": "a"}\n{"text": 7}\n', "'text' holds int where a text is needed"),
    "latin.jsonl": (b'{"text": "na\xef"}\n', NOT_UTF8),
    "none.jsonl": (b'{"text": ""}\n{"text": ""}\n', "no text at all|no characters at all"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "not valid JSON"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n{"text": "b"}\n', "half of a character"),
    "a.jsonl.gz": (b"no gzip", "is damaged or not complete"),
    "cut.jsonl.gz": (gzip.compress(LINES)[:-30], "is damaged or not complete"),
    "a.parquet": (b"no parquet", "cannot be read as a parquet file"),
    "null.parquet": (parquet(text=["x", None]), "'text' holds nothing where a text is needed"),
    "body.parquet": (parquet(body=["x"], id=[1]), r"has no column 'text'; its columns are: body, id"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_an_error(tmp_path, name):
    content, said = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    tokenizer = "chars" if name.startswith("latin") else "bytes"
    with pytest.raises(ConfigError, match=said):
        make(tmp_path / "out", source=str(tmp_path / name), validation=0, tokenizer=tokenizer)
    assert "no text" in said or not list(tmp_path.glob("out/*")), "the folder is free for another attempt"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"source": "nowhere"}, "nowhere does not exist"),
        ({}, "text needs a source"),
        ({"name": "shakespeare"}, "input.txt"),
        ({"source": "empty"}, "holds no text; files are known by their endings"),
        ({"source": "a.txt", "tokenizerr": "bytes"}, r"tokenizerr: unknown key; did you mean tokenizer\?"),
        ({"source": "a.txt", "validation": "lots"}, "validation: lots given; needs a number >= 0 and < 1"),
        ({"source": "a.txt", "tokenizer": "what"}, "no tokenizer 'what'"),
        ({"source": "a.txt", "split": "random"}, "leaves none for training"),
        ({"source": "a.txt"}, "1 characters, too few"),
        ({"name": "ptb", "source": "a.txt"}, "has the splits: none by its names; need train or validation"),
        ({"name": "lambada", "source": "train.txt"}, "has the splits: train; need test"),
        ({"name": "wikitxt2"}, "did you mean 'wikitext2'"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("a.txt", "train.txt"):
        (tmp_path / name).write_text("x")
    options = {"name": "text", "tokenizer": "bytes", **options}
    with pytest.raises(ConfigError, match=said):
        prepare(options.pop("name"), options, tmp_path / "out")


def test_bytes_take_any_encoding(tmp_path):
    content = b"na\xefve \xff\r\n" * 50
    (tmp_path / "a.txt").write_bytes(content)
    folder = make(tmp_path / "a", source=str(tmp_path / "a.txt"))
    assert bytes(all_tokens(folder) + all_tokens(folder, "validation")) == content
    assert folder.split("train").num_bytes == folder.split("train").num_tokens
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "na\xefve"}\n{"text": "plain"}\n')
    made = make(tmp_path / "b", source=str(tmp_path / "b.jsonl"), validation=0)
    assert bytes(all_tokens(made)) == b"na\xefve\nplain\n"


def test_a_table_in_a_data_set_that_cannot_be_read(tmp_path, monkeypatch):
    import datasets

    datasets.Dataset.from_dict({"body": DOCUMENTS}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="has no column 'text'; its columns are: body"):
        make(tmp_path / "out", source=str(tmp_path / "other"), validation=0)
    datasets.Dataset.from_dict({"text": []}).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"holds no documents|it is empty or damaged"):
        make(tmp_path / "out", source=str(tmp_path / "empty"), validation=0)
    load_from_memory(monkeypatch, train={"body": ["x", "y"]})
    with pytest.raises(ConfigError, match="has no column 'text'; its columns are: body"):
        make(tmp_path / "out", source="hub:any/thing")


def test_a_format_can_be_given(tmp_path):
    (tmp_path / "table.dat").write_bytes(LINES)
    (tmp_path / "notes.md").write_text("# Notes\n")
    for name, format, expected in (("table.dat", "jsonl", DOCUMENTS), ("notes.md", "text", ["# Notes\n"])):
        folder = make(tmp_path / format, source=str(tmp_path / name), format=format, validation=0)
        assert texts(folder) == expected


def test_the_hub_is_not_reached(tmp_path, monkeypatch):
    import datasets
    from huggingface_hub import constants

    def load(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("tost.data._tables.unreachable", lambda: "")
    with pytest.raises(ConfigError, match="cannot be loaded from the hub: no route; give --source"):
        make(tmp_path / "out", "openwebtext", tokenizer="bytes")
    monkeypatch.setattr("tost.data._tables.unreachable", lambda: "there is no network")
    with pytest.raises(ConfigError, match="not on this machine, and there is no network; give --source"):
        make(tmp_path / "out", "openwebtext", tokenizer="bytes")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tost.data.text.tokenizers.unreachable", lambda: "there is no network")
    with pytest.raises(ConfigError, match="not on this machine, and there is no network"):
        make(tmp_path / "out", source="a.txt", tokenizer="gpt2")


def test_a_long_text_that_parquet_stores_once_is_unpacked_a_few_at_a_time(tmp_path):
    import pyarrow.parquet as pq

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int8()), pa.array(["x" * (1 << 23)]))
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet", compression="zstd")
    job = TextOptions(source=str(tmp_path / "a.parquet")).job()
    with limited(2):
        document = next(documents_of(find_sources(job)["train"], job))
    assert len("".join(document)) == 1 << 23


def test_lines_without_end_are_not_read(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(1 << 33)
    with limited(1.5), pytest.raises(ConfigError, match=r"a\.jsonl has a line of more than 268,435,456 bytes"):
        make(tmp_path / "out", source=str(tmp_path / "a.jsonl"))
