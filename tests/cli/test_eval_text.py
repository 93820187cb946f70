"""`tost eval --protocol`: language models on prepared text."""

from __future__ import annotations

import json

import pytest

from tests.recipes.language_folders import train, write_passages, write_text
from tost.cli import _console


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval_text")
    write_passages(folder, ["the rose is red", "as sweet as you"])
    train(folder, write_text(folder))
    return folder


def test_protocols_and_their_numbers(run, trained):
    outcome = run("eval", str(trained / "run"), "--protocol", "sliding", "--stride", "4", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out.splitlines()[-1])
    assert found["protocol"] == "sliding"
    assert {"loss", "perplexity", "bits_per_byte", "word_perplexity", "fingerprint", "split"} <= set(found)
    assert "bits_per_byte" in outcome.out


def test_progress_is_shown_and_windows_are_counted(run, trained, monkeypatch):
    told = []
    monkeypatch.setattr(_console.Progress, "update", lambda self, *counts: told.append(counts[:2]))
    arguments = ("evaluate.batch_size=4", "--protocol", "authors", "--windows", "10", "--json")
    outcome = run("eval", str(trained / "run"), *arguments)
    assert json.loads(outcome.out.splitlines()[-1])["tokens"] == 10 * 16
    assert told == [(4, 10), (8, 10), (10, 10)]


def test_other_texts_and_files(run, trained, tmp_path):
    data = (f"data.path={trained / 'passages'}", "data.options.validation_split=test")
    where = ("--out", str(tmp_path / "report"))
    outcome = run("eval", str(trained / "run"), *data, "--protocol", "last-word", *where)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == str(tmp_path / "report" / "evaluation.json")
    assert json.loads((tmp_path / "report" / "evaluation.json").read_text())["passages"] == 2


REFUSED = {
    "no protocol": (["--stride", "4"], "--stride given without --protocol"),
    "not of this protocol": (["--protocol", "blocks", "--windows", "4"], "windows=4 has no effect"),
    "unknown": (["--protocol", "guess"], "'guess' is not one of"),
    "no limit": (["--protocol", "stream"], "max_length=16"),
    "no such folder": (["data.path=nowhere", "--protocol", "blocks"], "nowhere"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_mistakes_are_explained(refuse, trained, arguments, message):
    refuse(message, "eval", str(trained / "run"), *arguments)


def test_configurations_need_weights_and_language_models(refuse, trained):
    verse = f"data.path={trained / 'verse'}"
    refuse("add train.init_from=PATH", "eval", "small/shakespeare", verse, "--protocol", "blocks")
    refuse("measures language models, but", "eval", "demo/digits", "train.init_from=x", "--protocol", "blocks")
