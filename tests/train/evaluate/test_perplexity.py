"""Losses of texts: each protocol against a computation that shares no code with it, and against the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation.models import VOCABULARY, endless, make
from tests.models.tiny import PLUS
from tost.errors import ConfigError
from tost.train.evaluate.text import Score, score_random, score_stream, score_windows

ENDLESS, LIMITED = endless(), make(max_length=24)


def text_of(length, seed=0):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def log_probability(model, context, token):
    """Of one token after a context, from the logits of a whole pass."""
    with torch.no_grad():
        return model(context[None])[0, -1].log_softmax(dim=-1)[token].item()


def naive(model, text, length, stride):
    """Token by token: by which window it is scored first decides its context."""
    total = 0.0
    for target in range(1, len(text)):
        window = max(0, math.ceil((target - length) / stride))
        total -= log_probability(model, text[window * stride : target], text[target])
    return total


@given(extra=st.integers(0, 13), length=st.integers(1, 8), data=st.data())
@settings(max_examples=25, deadline=None)
def test_windows_score_every_token_once_with_the_context_they_promise(extra, length, data):
    stride, batch = data.draw(st.integers(1, length)), data.draw(st.integers(1, 5))
    text = text_of(length + 1 + extra)
    score = score_windows(LIMITED, text, length=length, stride=stride, batch_size=batch)
    assert score.tokens == len(text) - 1
    assert score.nats == pytest.approx(naive(LIMITED, text, length, stride), rel=1e-9)


@given(chunk=st.integers(1, 70), length=st.integers(2, 60))
@settings(max_examples=20, deadline=None)
def test_a_stream_is_one_forward_pass_whatever_the_chunks(chunk, length):
    text = text_of(length, seed=2)
    expected = ENDLESS.loss(text[None, :-1], text[None, 1:], reduction="sum").item()
    score = score_stream(ENDLESS, text, chunk_size=chunk)
    assert (score.nats, score.tokens) == (pytest.approx(expected, rel=1e-9), length - 1)


@pytest.mark.parametrize("options", [{"mixer": "softmax", "layer_scale": None}, {**PLUS, "conv_width": 3}])
def test_streams_of_other_models(options):
    model, text = endless(**options), text_of(40)
    one_window = score_windows(model, text, length=39)
    assert score_stream(model, text, chunk_size=7).nats == pytest.approx(one_window.nats, rel=1e-9)


def test_streams_hold_few_logits_at_once(monkeypatch):
    expected = score_stream(ENDLESS, text_of(50))
    monkeypatch.setattr("tost.train.evaluate.text._LOGITS_AT_ONCE", 3 * VOCABULARY)
    seen = []
    logits = type(ENDLESS).logits
    monkeypatch.setattr(type(ENDLESS), "logits", lambda model, x: seen.append(len(x)) or logits(model, x))
    assert score_stream(ENDLESS, text_of(50)).nats == pytest.approx(expected.nats, rel=1e-12)
    assert max(seen) == 3


def test_random_windows_are_those_of_the_seed():
    text, drawn = text_of(40), []

    class Spy:
        def __len__(self):
            return len(text)

        def __getitem__(self, piece):
            drawn.append(piece.start)
            assert piece.stop <= len(text)
            return text[piece]

    told = []
    given = {"windows": 200, "batch_size": 4}
    score = score_random(LIMITED, Spy(), length=8, **given, seed=3, report=lambda *numbers: told.append(numbers))
    assert (told[0], told[-1], len(told)) == ((4, 200), (200, 200), 50)
    assert len(drawn) == 200
    assert set(drawn) == set(range(32)), "every place can be drawn, the first and the last too"
    each = [naive(LIMITED, text[begin : begin + 9], 8, 8) / 8 for begin in drawn]
    assert score.loss == pytest.approx(sum(each) / 200, rel=1e-9)
    batches = torch.tensor(each, dtype=torch.float64).view(50, 4).mean(dim=1)
    assert score.error == pytest.approx(batches.std().item() / math.sqrt(50), rel=1e-9)
    assert score == score_random(LIMITED, text, length=8, **given, seed=3)
    assert score != score_random(LIMITED, text, length=8, **given, seed=4)
    assert score_random(LIMITED, text, length=8, windows=4, batch_size=4).error is None
    assert score_random(LIMITED, text, length=8, windows=201, batch_size=4, seed=3).tokens == 201 * 8


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int64])
def test_arrays_are_read_as_tensors_are(kind):
    text = text_of(30)
    array = text.numpy().astype(kind)
    assert score_windows(LIMITED, array, length=8, stride=3) == score_windows(LIMITED, text, length=8, stride=3)
    assert score_stream(ENDLESS, array) == score_stream(ENDLESS, text)


def test_dropout_is_off_and_comes_back():
    model = make(dropout=0.5).train()
    first = score_windows(model, text_of(30), length=8, stride=3)
    assert first == score_windows(model, text_of(30), length=8, stride=3)
    assert all(module.training for module in model.modules())


def test_numbers_that_are_told():
    score = Score(nats=math.log(2) * 30, tokens=10)
    assert score.metrics() == pytest.approx(
        {"loss": 3 * math.log(2), "perplexity": 8.0, "bits_per_token": 3.0, "tokens": 10.0}
    )
    assert score.metrics(bytes_per_token=4.0)["bits_per_byte"] == pytest.approx(0.75)
    assert Score(1.0, 1, error=0.5).metrics()["loss_error"] == 0.5
    assert Score(1e6, 1).metrics()["perplexity"] == math.inf


REFUSED = {
    "window longer than the text": (lambda: score_windows(LIMITED, text_of(8), length=8), "has 8 tokens, .* need 9"),
    "drawn window too": (lambda: score_random(LIMITED, text_of(8), length=8), "at most 7 tokens"),
    "positions": (lambda: score_windows(LIMITED, text_of(50), length=25), "max_length=24; use 24 or less"),
    "stride too long": (lambda: score_windows(LIMITED, text_of(20), length=8, stride=9), "stride=9 .* 1 to 8"),
    "stride of nothing": (lambda: score_windows(LIMITED, text_of(20), length=8, stride=0), "stride=0 .* 1 to 8"),
    "window of nothing": (lambda: score_windows(LIMITED, text_of(20), length=0), "at least 1"),
    "stream over positions": (lambda: score_stream(LIMITED, text_of(26)), "26 tokens, .*max_length=24.*sliding"),
    "stream of nothing": (lambda: score_stream(ENDLESS, text_of(1)), "at least 2 are needed"),
    "no language model": (lambda: score_stream(torch.nn.Linear(1, 1), text_of(9)), "not a causal language model"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
