"""A trained language model keeps its tokenizer, wherever it goes and whatever becomes of the data."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.recipes.language_folders import train, write_text
from tost.train.tokenizer import find_tokenizer


@pytest.fixture
def trained(tmp_path):
    """Return the run of a model of characters, whose data is gone."""
    data = write_text(tmp_path, tokenizer="chars")
    run = train(tmp_path, data, "data.options.vocab_size=null")
    shutil.rmtree(data)
    return run


def test_generate_finds_the_tokenizer_beside_run_checkpoint_and_converted_model(run, trained, tmp_path):
    converted = run("convert", str(trained), "--out", str(tmp_path / "model"), "--to", "tost")
    assert converted.code == 0, converted.err
    again = run("convert", str(trained), "--out", str(tmp_path / "model"), "--to", "tost", "--force")
    assert again.code == 0, again.err  # the tokenizer in the folder is no stranger
    texts = set()
    for folder in (trained, trained / "checkpoints" / "last", tmp_path / "model"):
        outcome = run("generate", str(folder), "--prompt", "the rose", "--max-new-tokens", "9", "--seed", "1", "--json")
        assert outcome.code == 0, outcome.err
        texts.add(json.loads(outcome.out)["text"])
    (text,) = texts
    assert len(text) == 9
    assert set(text) <= set("the rose is red the violet blue and sugar is as sweet as you\n")


def test_what_the_tokenizer_does_not_know_is_an_error(refuse, trained):
    refuse("Ü", "generate", str(trained), "--prompt", "Ümlaut")


def test_a_damaged_tokenizer_is_named(refuse, trained):
    record = trained / "tokenizer_record.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "fingerprint": "0" * 64}))
    refuse("not the one that was written", "generate", str(trained), "--prompt", "the")


def test_old_runs_use_the_tokenizer_of_their_data(tmp_path):
    data = write_text(tmp_path, tokenizer="chars")
    run = train(tmp_path, data, "data.options.vocab_size=null")
    known = find_tokenizer(run)
    (run / "tokenizer_record.json").unlink()
    assert known is not None
    assert find_tokenizer(run).fingerprint == known.fingerprint
    shutil.rmtree(data)
    assert find_tokenizer(run) is None
