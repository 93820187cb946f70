"""Corpora that are known by name: their splits, rows and edits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.text.samples import (
    DOCUMENTS,
    all_tokens,
    load_from_memory,
    make,
    texts,
    write_jsonl,
    write_parquet,
    write_tokenizer,
)
from tost.data.tokens.reader import lambada_pairs, open_tokens
from tost.errors import ConfigError

WIKI = ' \n = Ships = \n \n The ship @-@ yard had 1 @,@ 000 men ( in 1912 ) . \n A <unk> " sank " . \n'
PASSAGES = ["He opened the door and saw the whale", "\u201cNo,\u201d she said, and closed the door"]


@pytest.fixture
def bpe(tmp_path):
    return str(write_tokenizer(tmp_path / "bpe"))


def write_splits(folder, pattern, **splits):
    folder.mkdir()
    for split, text in splits.items():
        (folder / pattern.format(split)).write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("pattern", ["wiki.{}.tokens", "{}.txt", "wiki.{}.raw"])
def test_wikitext_as_the_authors_take_it(tmp_path, bpe, pattern):
    source = write_splits(tmp_path / "source", pattern, train=WIKI * 2, valid=WIKI, test=WIKI)
    folder = make(tmp_path / "out", "wikitext2", source=source, tokenizer=bpe)
    assert folder.splits == ("train", "validation", "test")
    rows = ["", " = Ships = \n", "", *(f"{line}\n" for line in WIKI.split("\n")[3:5])]
    assert texts(folder, "test") == rows
    assert all_tokens(folder, "test").count(folder.end_of_text) == len(rows)
    assert len(texts(folder)) == 2 * len(rows)


def test_wikitext_as_running_text(tmp_path, bpe, monkeypatch):
    source = write_splits(tmp_path / "source", "{}.txt", test=WIKI)
    joined = make(tmp_path / "joined", "wikitext103", source=source, tokenizer=bpe, joined=True)
    assert texts(joined, "test") == [WIKI]
    assert all_tokens(joined, "test").count(joined.end_of_text) == 1
    options = {"tokenizer": bpe, "joined": True, "detokenize": True, "splits": "test"}
    plain = make(tmp_path / "plain", "wikitext103", source=source, **options)
    expected = '\n= Ships =\n\nThe ship-yard had 1,000 men (in 1912).\nA <unk> "sank".\n'
    assert texts(plain, "test") == [expected]
    assert plain.split("test").num_bytes == len(expected)
    assert plain.split("test").source_bytes == len(WIKI)
    # The hub's rows are lines; blank ones are empty.
    asked = load_from_memory(monkeypatch, test=["", " = Ships = \n", "", *(f"{x}\n" for x in WIKI.split("\n")[3:5])])
    hub = make(tmp_path / "hub", "wikitext103", **options)
    assert texts(hub, "test") == [expected]
    assert asked[0][1] == "wikitext-103-raw-v1"


def test_ptb(tmp_path, bpe):
    source = write_splits(tmp_path / "source", "ptb.{}.txt", test=" he did n't pay $ N \n <unk> 's lawyer , too \n")
    folder = make(tmp_path / "out", "ptb", source=source, tokenizer=bpe, splits="test")
    assert texts(folder, "test") == [" he did n't pay $ N ", " <unk> 's lawyer , too "]
    plain = make(tmp_path / "plain", "ptb", source=source, tokenizer=bpe, joined="true", detokenize="true")
    assert texts(plain, "test") == ["he didn't pay $N\n<unk>'s lawyer, too\n"]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_lambada_is_cut_before_the_last_word(tmp_path, bpe, tokenizer):
    source = write_jsonl(tmp_path / "lambada_test.jsonl", PASSAGES)
    chosen = bpe if tokenizer == "bpe" else "bytes"
    folder = make(tmp_path / "out", "lambada", source=str(source), tokenizer=chosen)
    encode = folder.tokenizer().encode
    for (context, word), passage in zip(lambada_pairs(folder.split("test")), PASSAGES, strict=True):
        assert context + word == encode(passage)
        assert folder.tokenizer().decode(word) == f" {passage.split()[-1]}"
    straight = make(tmp_path / "q", "lambada", source=str(source), tokenizer=chosen, straight_quotes=True)
    assert texts(straight, "test")[1] == '"No," she said, and closed the door'
    assert straight.split("test").source_bytes > straight.split("test").num_bytes


def test_lambada_needs_passages(tmp_path):
    source = write_jsonl(tmp_path / "test.jsonl", ["word"])
    folder = make(tmp_path / "out", "lambada", source=str(source), tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"document 0 .* no passage"):
        lambada_pairs(folder.split("test"))


def test_shakespeare_is_cut_like_nanogpt(tmp_path):
    text = "To be, or not to be,\nthat is the question:\u00e9\n" * 37
    path = tmp_path / "input.txt"
    path.write_text(text, encoding="utf-8")
    folder = make(tmp_path / "out", "shakespeare", source=str(path))
    place = int(len(text) * 0.9)
    alphabet = sorted(set(text))
    assert all_tokens(folder) == [alphabet.index(character) for character in text[:place]]
    assert all_tokens(folder, "validation") == [alphabet.index(character) for character in text[place:]]
    assert folder.vocab_size == len(alphabet)
    assert folder.end_of_text is None


def test_openwebtext(tmp_path, bpe):
    write_parquet(tmp_path / "plain_text" / "train-00000-of-00002.parquet", DOCUMENTS[:12])
    write_parquet(tmp_path / "plain_text" / "train-00001-of-00002.parquet", DOCUMENTS[12:])
    folder = make(tmp_path / "out", "openwebtext", source=str(tmp_path / "plain_text"), tokenizer=bpe)
    chosen = int(np.random.default_rng(2357).permutation(len(DOCUMENTS))[0])
    assert texts(folder, "validation") == [DOCUMENTS[chosen]]
    assert texts(folder) == [text for number, text in enumerate(DOCUMENTS) if number != chosen]
    assert open_tokens(folder.path).index.settings["split"]["seed"] == 2357


def test_own_splits(tmp_path):
    source = write_splits(tmp_path / "source", "{}.txt", train="train text", val="validation text", test="test text")
    folder = make(tmp_path / "out", source=source)
    assert {split: texts(folder, split) for split in folder.splits} == {
        "train": ["train text"],
        "validation": ["validation text"],
        "test": ["test text"],
    }
    lines = make(tmp_path / "tail", source=source, split="tail", validation=0.3, documents="line")
    assert (texts(lines), texts(lines, "validation")) == (["test text", "train text"], ["validation text"])
