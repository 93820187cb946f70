"""Tokenizers for data: what they encode they decode, and cutting a text changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.text.samples import DOCUMENTS, write_pairs, write_tokenizer
from tost._tokenizer import ByteTokenizer
from tost.data.text.tokenizers import (
    RECORD_FILE,
    CharTokenizer,
    HFTokenizer,
    cut_text,
    end_of_text_id,
    load_tokenizer,
    read_tokenizer,
    save_tokenizer,
)
from tost.errors import ConfigError

# Dense in what GPT-2's rule is sensitive to.
PROSE = st.text(st.sampled_from(" \n\t\rab.'s1!\u00a0\u3000\u00e9"), max_size=60)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return load_tokenizer(str(write_pairs(tmp_path_factory.mktemp("pairs"))))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return load_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("single"))))


def test_two_forms_of_files_are_one_tokenizer(pairs, single):
    assert isinstance(pairs, HFTokenizer)
    assert pairs.fingerprint == single.fingerprint
    assert [pairs.encode(text) for text in DOCUMENTS] == [single.encode(text) for text in DOCUMENTS]


def test_another_merge_is_another_tokenizer(tmp_path, single):
    content = json.loads((write_tokenizer(tmp_path) / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert load_tokenizer(str(tmp_path)).fingerprint != single.fingerprint


def test_special_tokens_in_text_are_words(single, pairs):
    text = "before <|endoftext|> after"
    end = end_of_text_id(single, "auto")
    for tokenizer in (single, pairs):
        ids = tokenizer.encode(text)
        assert end not in ids
        assert end not in tokenizer.encode_batch([text])[0]
        assert tokenizer.decode(ids) == text


@given(text=st.text(max_size=80))
def test_decoding_undoes_encoding(single, text):
    tokenizers = [ByteTokenizer(), single, *([CharTokenizer("".join(sorted(set(text))))] if text else [])]
    for tokenizer in tokenizers:
        text = text.encode("utf-8", errors="ignore").decode()
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_batch(["", text])[1].tolist() == ids
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        decoder = tokenizer.decoder()
        assert "".join([*(decoder.feed([token]) for token in ids), decoder.finish()]) == text


@pytest.mark.parametrize("kind", ["bytes", "chars", "single", "pairs"])
@given(text=PROSE, block=st.integers(1, 9), size=st.integers(1, 12))
def test_cut_text_has_the_ids_of_the_whole(request, kind, text, block, size):
    known = {"bytes": ByteTokenizer(), "chars": CharTokenizer("".join(sorted(set("\0" + text))))}
    tokenizer = known[kind] if kind in known else request.getfixturevalue(kind)
    blocks = [text[start : start + block] for start in range(0, len(text), block)]
    parts = list(cut_text(blocks, tokenizer, size))
    assert "".join(parts) == text
    together = np.concatenate([np.empty(0, dtype=np.int64), *tokenizer.encode_batch(parts)])
    assert together.tolist() == tokenizer.encode(text)


def test_a_long_text_is_cut_between_lines_unless_the_rules_are_unknown(tmp_path, single):
    assert max(map(len, cut_text(["One line.\nAnother line.\n" * 50], single, 100))) <= 100
    content = json.loads((write_tokenizer(tmp_path) / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert list(cut_text(["a\nb\n" * 50], tokenizer, 10)) == ["a\nb\n" * 50]


def test_a_tokenizer_travels_with_a_run(tmp_path, single):
    assert read_tokenizer(tmp_path) is None
    for tokenizer in (ByteTokenizer(), CharTokenizer("abc"), single):
        save_tokenizer(tokenizer, tmp_path)
        again = read_tokenizer(tmp_path)
        assert (again.name, again.fingerprint) == (tokenizer.name, tokenizer.fingerprint)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="is not the one that was written there"):
        read_tokenizer(tmp_path)
    wrong = ([], [1], {"kind": "x"}, {"kind": "chars", "characters": 7}, {"kind": "chars", "characters": ["a", "b"]})
    for record in wrong:
        (tmp_path / RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")
        with pytest.raises(ConfigError):
            read_tokenizer(tmp_path)


def test_end_of_text(single):
    assert single.id_of("<|endoftext|>") == end_of_text_id(single, "auto")
    assert end_of_text_id(single, "none") is None
    assert end_of_text_id(ByteTokenizer(), "auto") is None
    assert end_of_text_id(ByteTokenizer(), "\n") == 10
    with pytest.raises(ConfigError, match="no token 'nowhere'"):
        end_of_text_id(single, "nowhere")
    with pytest.raises(ConfigError, match="2 ids"):
        end_of_text_id(ByteTokenizer(), "ab")


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="there is no tokenizer 'nonsense'"):
        load_tokenizer("nonsense")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="'z' is not in the alphabet"):
        CharTokenizer("abc").encode("az")
    with pytest.raises(ConfigError, match="once"):
        CharTokenizer("ba")


def test_preparing_loads_no_torch():
    program = "import sys, tost.data.text.prepare, tost.data.tokens.reader; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
