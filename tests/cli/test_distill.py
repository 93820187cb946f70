"""`tost distill`: a pretrained model and text in, a model with TSSA out."""

from __future__ import annotations

import itertools
import json

import pytest
import tokenizers
import torch
import transformers

from tests.integrations.replace.models import example, make
from tost.integrations.distill import TextBatches
from tost.integrations.replace.saved import load_replaced

LETTERS = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of letters, and sentences."""
    root = tmp_path_factory.mktemp("teacher")
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {letter: place for place, letter in enumerate(LETTERS, 2)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    made.save_pretrained(root / "model")
    make("encoder_bert").save_pretrained(root / "model")
    sentences = [f"sentence number {'abcdefghij'[place % 10]} of the text {place * 7 % 13}" for place in range(80)]
    (root / "text.txt").write_text("\n".join(sentences))
    (root / "rows.jsonl").write_text("\n".join(json.dumps({"body": sentence}) for sentence in sentences))
    return root


def test_a_model_that_is_not_there_is_said_at_once(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tost.data._hub.unreachable", lambda: "there is no network")
    outcome = run("distill", "some/model", "--data", str(folder / "text.txt"), "--out", str(tmp_path / "out"))
    assert outcome.code == 2
    assert "cannot load some/model: there is no such folder, it is not on this machine, and there is no" in outcome.err


def test_the_command(run, folder, tmp_path):
    out = tmp_path / "student"
    arguments = ("--layer-steps", "2", "--output-steps", "2", "--batch-size", "4", "--length", "16", "--layers", "0,-1")
    outcome = run("distill", str(folder / "model"), "--data", str(folder / "text.txt"), "--out", str(out), *arguments)
    assert outcome.code == 0, outcome.err
    assert "distance after" in outcome.out
    model = load_replaced(out)
    assert model.config.tost_attention[0]["layers"] == [0, 2]
    assert torch.isfinite(model(example("encoder_bert") % 28)[0]).all()
    again = run("distill", str(folder / "model"), "--data", str(folder / "text.txt"), "--out", str(out))
    assert (again.code, "exists and was left as it is" in again.err) == (2, True)


def test_ctrl_c_keeps_the_model(run, folder, tmp_path, monkeypatch):
    draw = TextBatches.__iter__

    def stops(self):
        yield from itertools.islice(draw(self), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(TextBatches, "__iter__", stops)
    out = tmp_path / "student"
    where = ("--data", str(folder / "text.txt"), "--out", str(out))
    sizes = ("--layer-steps", "2", "--output-steps", "9", "--batch-size", "4", "--length", "16")
    outcome = run("distill", str(folder / "model"), *where, *sizes, "--json")
    assert (outcome.code, "interrupted; the model is written as it is now" in outcome.err) == (130, True)
    told = json.loads(outcome.out.splitlines()[-1])
    assert (len(told["layer_losses"]), len(told["output_losses"])) == (2, 1)
    assert len(load_replaced(out).config.tost_attention[0]["layers"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "one"), "--layers one is not understood"),
        (("--layers", "7"), "the model has 3 self-attention layers"),
        (("--batch-size", "500"), "but a batch takes 500"),
    ],
)
def test_mistakes_of_the_command(run, folder, tmp_path, arguments, message):
    data = ("--data", str(folder / "text.txt"), "--out", str(tmp_path / "x"))
    outcome = run("distill", str(folder / "model"), *data, *arguments)
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


def test_a_missing_model_and_a_missing_column(run, folder, tmp_path):
    out = ("--out", str(tmp_path / "x"))
    outcome = run("distill", str(folder / "nothing"), "--data", str(folder / "text.txt"), *out)
    assert (outcome.code, "cannot load" in outcome.err) == (2, True)
    outcome = run("distill", str(folder / "model"), "--data", str(folder / "rows.jsonl"), *out)
    assert (outcome.code, "body" in outcome.err) == (2, True)


def test_texts_are_held_out_and_drawn_again(folder):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    texts = TextBatches(str(folder / "rows.jsonl"), tokenizer, column="body", batch_size=8, length=40)
    assert (len(texts.train), len(texts.held_out)) == (76, 4)
    assert not set(texts.train) & set(texts.held_out)
    drawn = iter(texts)
    first = [next(drawn)["input_ids"] for _ in range(9)]
    assert all(len(batch) == 8 for batch in first)
    assert not torch.equal(first[0], next(drawn)["input_ids"])
