"""Last words: the usual protocol by hand, token by token, and the authors' by text."""

from __future__ import annotations

import math

import pytest
import torch

import tost
from tests.generation.models import VOCABULARY, endless, make
from tost.errors import ConfigError
from tost.train.evaluate.text import LastWords, Passage, score_last_words, score_last_words_by_generation

MODEL = make(max_length=24)


def passages(count, seed=0):
    """Passages of different lengths; every other word is the one that the model expects."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        context = torch.randint(VOCABULARY, (3 + index % 7,), generator=generator).tolist()
        word = torch.randint(VOCABULARY, (1 + index % 3,), generator=generator).tolist()
        if index % 2:
            word = tost.generate(MODEL, torch.tensor([context]), max_new_tokens=len(word), temperature=0)[0].tolist()
            word = word[len(context) :]
        made.append(Passage(context, word))
    return made


def by_hand(model, passage):
    """Whether a word is right, and minus the logarithm of its probability."""
    ids, right, nats = list(passage.context), True, 0.0
    for token in passage.word:
        logits = model(torch.tensor([ids]))[0, -1]
        right &= int(logits.argmax()) == token
        nats -= logits.log_softmax(dim=-1)[token].item()
        ids.append(token)
    return right, nats


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_words_are_right_if_every_token_is(batch_size):
    asked = passages(20)
    with torch.no_grad():
        expected = [by_hand(MODEL, passage) for passage in asked]
    found = score_last_words(MODEL, asked, batch_size=batch_size)
    assert 10 <= found.correct < 20
    assert found.correct == sum(right for right, _ in expected)
    assert found.nats == pytest.approx(sum(nats for _, nats in expected), rel=1e-9)
    assert (found.passages, found.word_tokens) == (20, sum(len(passage.word) for passage in asked))


def test_one_wrong_token_makes_a_wrong_word():
    context = [1, 2, 3]
    word = tost.generate(MODEL, torch.tensor([context]), max_new_tokens=3, temperature=0)[0, 3:].tolist()
    assert score_last_words(MODEL, [Passage(context, word)]).correct == 1
    for place in range(3):
        wrong = [(token + 1) % VOCABULARY if index == place else token for index, token in enumerate(word)]
        assert score_last_words(MODEL, [Passage(context, wrong)]).correct == 0


def test_long_contexts_lose_their_beginning():
    long = Passage(list(range(11)) * 3, [4, 5])
    short = Passage(long.context[-23:], [4, 5])  # 23 + 1 tokens are read, the last one is only predicted
    assert score_last_words(MODEL, [long]) == score_last_words(MODEL, [short])
    assert score_last_words(endless(), [long]) != score_last_words(endless(), [short])
    with pytest.raises(ConfigError, match="a last word has 25 tokens"):
        score_last_words(MODEL, [Passage([1], [1] * 25)])
    assert score_last_words(MODEL, [Passage([1, 2], [1] * 24)]).passages == 1


def test_metrics():
    found = LastWords(correct=1, passages=4, nats=4 * math.log(5), word_tokens=8).metrics()
    assert found == pytest.approx(
        {"last_word_accuracy": 0.25, "last_word_perplexity": 5.0, "last_word_loss": math.log(5) / 2, "passages": 4.0}
    )
    assert LastWords(1, 1, 1e6, 1).metrics()["last_word_perplexity"] == math.inf
    assert LastWords(2, 4).metrics() == {"last_word_accuracy": 0.5, "passages": 4.0}


LETTERS = "abcdefg h'\n"  # one for each id of the model


def encode(text):
    return [LETTERS.index(letter) for letter in text]


def decode(ids):
    return "".join(LETTERS[index] for index in ids)


def test_the_authors_look_for_the_word_in_ten_tokens():
    context = "fed a cab"
    ten = decode(
        tost.generate(MODEL, torch.tensor([encode("\n" + context)]), max_new_tokens=10, temperature=0)[0, -10:]
    )
    inside = max(ten.split(), key=len)
    asked = {f"{context} {inside}": True, f"{context} {inside.upper()} ": True, f"{context} {inside}zz": False}
    for text, right in asked.items():
        found = score_last_words_by_generation(MODEL, [text], encode, decode)
        assert (found.correct, found.passages, found.nats) == (int(right), 1, None), text
    together = score_last_words_by_generation(MODEL, list(asked), encode, decode, batch_size=2)
    assert (together.correct, together.passages) == (2, 3)


def test_curly_quotes_become_plain_and_long_passages_keep_their_end():
    read = []

    def spy(text):
        read.append(text)
        return encode(text)

    score_last_words_by_generation(MODEL, ["a \u2018bad\u2019 egg"], spy, decode)
    assert read == ["\na 'bad'"]
    assert score_last_words_by_generation(MODEL, ["bead " * 20 + "a"], encode, decode).passages == 1


def test_nothing_to_predict_is_an_error():
    with pytest.raises(ConfigError, match="there are no passages"):
        score_last_words(MODEL, [])
    with pytest.raises(ConfigError, match="there are no passages"):
        score_last_words_by_generation(MODEL, [], encode, decode)
    with pytest.raises(ConfigError, match="'bad' has fewer than two words"):
        score_last_words_by_generation(MODEL, ["bad"], encode, decode)
