"""Measuring language models on prepared text: every protocol finds its text, and refuses what does not fit."""

from __future__ import annotations

import math

import pytest
import torch

from tests.recipes.language_folders import TINY, VERSE, train, write_passages, write_text
from tost.data.prepare import prepare
from tost.errors import ConfigError
from tost.recipes import load_config
from tost.train.checkpoint.model import load_model
from tost.train.evaluate import Protocol, TextTest
from tost.train.evaluate.metrics import evaluate_checkpoint, evaluate_initial
from tost.train.evaluate.text import evaluate_text

PASSAGES = ["the rose is red", "the violet is blue and", "as sweet as you"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    write_text(folder)
    write_passages(folder, PASSAGES)
    train(folder, folder / "verse")
    train(folder / "endless", folder / "verse", "model.position=none")
    return folder


def measure(place, protocol, *overrides, run="run", **numbers):
    test = TextTest(protocol=Protocol(protocol), **numbers)
    checkpoint = place / run / "checkpoints" / "last"
    return evaluate_checkpoint(checkpoint, test=test, overrides=overrides)


def validation_text():
    whole = VERSE * 40
    return torch.tensor(list(whole[-round(len(whole) * 0.1) :].encode()))


def mean_loss(model, pieces):
    terms = sum(len(piece) - 1 for piece in pieces)
    with torch.no_grad():
        return sum(float(model.loss(p[None, :-1], p[None, 1:], reduction="sum")) for p in pieces) / terms


def test_blocks_are_the_validation_text_cut_into_pieces(place):
    text = validation_text()
    blocks = [text[begin : begin + 17] for begin in range(0, len(text) - 1, 16)]
    found = measure(place, "blocks").metrics
    assert found["loss"] == pytest.approx(mean_loss(load_model(place / "run").eval(), blocks), rel=1e-5)
    assert found["tokens"] == len(text) - 1
    assert found == measure(place, "sliding", stride=16).metrics
    assert found == pytest.approx(measure(place, "blocks", "evaluate.batch_size=3").metrics, rel=1e-5)


def test_units_follow_from_the_text(place):
    found = measure(place, "sliding").metrics
    assert found == measure(place, "sliding", length=16, stride=8).metrics
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-9), "a token is a byte"
    text = bytes(validation_text().tolist()).decode()
    per_word = found["loss"] * len(text) / len(text.split())
    assert found["word_perplexity"] == pytest.approx(math.exp(per_word), rel=1e-6)


def test_a_stream_needs_a_model_without_a_limit(place):
    model = load_model(place / "endless" / "run").eval()
    found = measure(place, "stream", run="endless/run").metrics
    assert found["loss"] == pytest.approx(mean_loss(model, [validation_text()]), rel=1e-5)
    with pytest.raises(ConfigError, match=r"max_length=16.*position=none"):
        measure(place, "stream")


def test_the_authors_draw_windows_by_the_seed(place):
    first = measure(place, "authors", windows=40)
    assert (first.metrics["tokens"], first.content()["protocol"]) == (40 * 16, "authors")
    assert first.metrics["loss_error"] > 0
    assert first.metrics == measure(place, "authors", windows=40).metrics
    assert first.metrics != measure(place, "authors", "train.seed=5", windows=40).metrics


def test_last_words(place):
    data = (f"data.path={place / 'passages'}", "data.options.validation_split=test")
    found = measure(place, "last-word", *data, run="endless/run")
    model = load_model(place / "endless" / "run").eval()
    nats, right = 0.0, 0
    for text in PASSAGES:
        ids, start = torch.tensor(list(text.encode())), len(text.rpartition(" ")[0])
        with torch.no_grad():
            logits = model(ids[None, :-1])[0, start - 1 :]
        nats += torch.nn.functional.cross_entropy(logits, ids[start:], reduction="sum").item()
        right += int((logits.argmax(dim=-1) == ids[start:]).all())
    assert found.metrics["last_word_perplexity"] == pytest.approx(math.exp(nats / 3), rel=1e-4)
    assert found.metrics["last_word_accuracy"] == right / 3
    assert found.content()["data"] == "lambada"
    generated = measure(place, "last-word-authors", *data, run="endless/run").metrics
    assert generated["passages"] == 3
    assert 0 <= generated["last_word_accuracy"] <= 1


def test_weights_without_a_run_and_the_embedded_bytes(place):
    weights = f"train.init_from={place / 'run'}"
    config = load_config("small/wikitext2", [f"data.path={place / 'verse'}", *TINY, "train.precision=fp32", weights])
    test = TextTest(protocol=Protocol.blocks)
    assert evaluate_initial(config, test=test).metrics == pytest.approx(measure(place, "blocks").metrics, rel=1e-4)
    config = load_config("small/stdlib_bytes", [*TINY, "model.name=tost_lm_base"])
    model = load_model(place / "run")
    found = evaluate_text(model, config, TextTest(protocol=Protocol.authors, windows=4)).content()
    assert (found["data"], found["bits_per_byte"]) == ("stdlib_bytes", pytest.approx(found["bits_per_token"]))


def test_other_tokenizers_are_refused(place, tmp_path):
    source = tmp_path / "digits.txt"
    source.write_text("0123456789" * 30)
    prepare("text", {"source": str(source), "tokenizer": "chars", "validation": 0.2}, tmp_path / "chars")
    with pytest.raises(ConfigError, match="was trained with another tokenizer"):
        measure(place, "blocks", f"data.path={tmp_path / 'chars'}")
    weights = (f"train.init_from={place / 'run'}", "model.vocab_size=256")
    config = load_config("small/wikitext2", [f"data.path={place / 'verse'}", *TINY, *weights])
    small = load_model(train(tmp_path, tmp_path / "chars", "data.options.vocab_size=null"))
    with pytest.raises(ConfigError, match=r"verse has 256 different ids, but the model has 1\d"):
        evaluate_text(small, config, TextTest(protocol=Protocol.blocks))


REFUSED = {
    "stride of blocks": ("blocks", {"stride": 4}, (), "stride=4 has no effect on the protocol blocks"),
    "windows of a stream": ("stream", {"windows": 4}, (), "windows=4 has no effect .* authors"),
    "nothing": ("sliding", {"stride": 0}, (), "at least 1"),
    "too long for the model": ("sliding", {"length": 17}, (), "max_length=16; use 16 or less"),
    "no such split": ("blocks", {}, ("data.options.validation_split=test",), "has no split 'test'; it has: train, val"),
}


@pytest.mark.parametrize(("protocol", "numbers", "overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(place, protocol, numbers, overrides, message):
    with pytest.raises(ConfigError, match=message):
        measure(place, protocol, *overrides, **numbers)
