"""Predicting the last word of passages (LAMBADA), and choosing among passages (Children's Book Test).

Two protocols exist for last words and give different numbers:

``usual``    the word is right if each of its tokens is the model's likeliest one, given the passage and the tokens
             before it; the perplexity is over words, ``exp(mean of -log p(word))``
``authors``  ten tokens are generated greedily after a line break and the passage; the word is right if it occurs in
             their text, whatever its case and wherever it stands

Shapes: ids [B, N], features [B, N, C].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.generation import Sampling, generate_with_state
from tost.generation.decode import check_causal, context_limit, evaluating

Item = TypeVar("Item")
GENERATED = 10
_PLAIN_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})


class Passage(NamedTuple):
    """A passage whose last word is to be predicted.

    Attributes:
        context: Token ids of everything before the last word.
        word: Token ids of the last word, with the space in front of it.
    """

    context: list[int]
    word: list[int]


class LastWords(NamedTuple):
    """How many last words were predicted.

    Attributes:
        correct: Number of words that were right.
        passages: Number of passages.
        nats: Summed ``-log p(word)``; None if the protocol does not tell.
        word_tokens: Tokens of all words together.
    """

    correct: int
    passages: int
    nats: float | None = None
    word_tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """Return accuracy and, where it is known, the perplexity per word and the loss per token of the words."""
        found = {"last_word_accuracy": self.correct / self.passages}
        if self.nats is not None:
            mean = self.nats / self.passages
            found["last_word_perplexity"] = math.exp(mean) if mean < 700 else math.inf
            found["last_word_loss"] = self.nats / self.word_tokens
        return {**found, "passages": float(self.passages)}


def score_last_words(model: nn.Module, passages: Sequence[Passage], *, batch_size: int = 8) -> LastWords:
    """Measure by the usual protocol.

    A context that is longer than the model's positions loses its beginning.

    Args:
        model: A causal language model.
        passages: Whose last words to predict.
        batch_size: Passages at a time; changes nothing but speed and memory.

    Raises:
        ConfigError: There are no passages, or a word alone is longer than the model's positions.

    Example:
        >>> import tost
        >>> from tost.train.evaluate.last_word import Passage, score_last_words
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> score_last_words(model, [Passage(list(b"to be or not to"), list(b" be"))]).word_tokens
        3
    """
    _check_some(passages)
    network: Any = check_causal(model)
    device = next(model.parameters()).device
    fitted = sorted((_fit(passage, context_limit(model)) for passage in passages), key=lambda p: len(p[0]) + len(p[1]))
    correct, nats = 0, []
    with torch.no_grad(), evaluating(model):
        for group in _groups(fitted, batch_size):
            rows, columns, words = _places(group)
            # Filled up at the end, where nothing reaches a token before it.
            read = [torch.tensor([*passage.context, *passage.word[:-1]], device=device) for passage in group]
            features, _ = network.features_with_state(nn.utils.rnn.pad_sequence(read, batch_first=True))
            logits = network.logits(features[rows, columns])
            wide = logits if logits.dtype == torch.float64 else logits.float()
            words = words.to(device)
            right = torch.ones(len(group), dtype=torch.bool, device=device)
            right[rows[wide.argmax(dim=-1) != words]] = False
            correct += int(right.sum())
            nats.append(float(F.cross_entropy(wide, words, reduction="sum")))
    return LastWords(correct, len(passages), math.fsum(nats), sum(len(passage.word) for passage in passages))


def score_last_words_by_generation(
    model: nn.Module,
    texts: Iterable[str],
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Iterable[int]], str],
    *,
    batch_size: int = 8,
) -> LastWords:
    """Measure by the authors' protocol, which counts more words as right than the usual one.

    Curly quotes are replaced by plain ones, as there.

    Args:
        model: A causal language model.
        texts: Passages.
        encode: From text to token ids.
        decode: From token ids to text.
        batch_size: Passages at a time; changes nothing but speed and memory.

    Raises:
        ConfigError: There are no passages, or one has fewer than two words.
    """
    asked: list[tuple[list[int], str]] = []
    limit = context_limit(model)
    for text in texts:
        context, _, word = text.strip().translate(_PLAIN_QUOTES).rpartition(" ")
        if not context:
            raise ConfigError(f"the passage {word[:40]!r} has fewer than two words; its last one cannot be predicted.")
        ids = list(encode("\n" + context))
        asked.append((ids if limit is None else ids[-max(limit - GENERATED, 1) :], word))
    _check_some(asked)
    asked.sort(key=lambda pair: len(pair[0]))
    correct = 0
    for group in _groups(asked, batch_size):
        prompts = [torch.tensor(ids) for ids, _ in group]
        done = generate_with_state(model, prompts, max_new_tokens=GENERATED, sampling=Sampling(temperature=0))
        for (_, word), tokens in zip(group, done.tokens.tolist(), strict=True):
            correct += word.lower() in decode(tokens).lower()
    return LastWords(correct, len(asked))


def score_choices(
    model: nn.Module, questions: Iterable[tuple[Sequence[Sequence[int]], int]], *, before: int | None
) -> dict[str, float]:
    """Answer questions with the likeliest of several passages, as the authors do with the Children's Book Test.

    Args:
        model: A causal language model.
        questions: For each the token ids of its passages, one for every candidate, and the number of the right one. A
            passage that is longer than the model's positions loses its beginning.
        before: Token that is read before each passage, such as the end of a text; None for none.

    Returns:
        The share of questions that were answered rightly, and their number.

    Raises:
        ConfigError: There are no questions.
    """
    limit, device = context_limit(model), next(model.parameters()).device
    first = [] if before is None else [before]

    def surprise(passage: Sequence[int]) -> float:
        ids = torch.tensor([*first, *passage], device=device)
        ids = ids if limit is None else ids[-limit - 1 :]
        return float(model(ids[None, :-1], targets=ids[None, 1:]))

    right = []
    with torch.no_grad(), evaluating(model):
        for passages, answer in questions:
            found = [surprise(passage) for passage in passages]
            right.append(found.index(min(found)) == answer)
    _check_some(right)
    return {"choice_accuracy": sum(right) / len(right), "questions": float(len(right))}


def _check_some(passages: Sequence[object]) -> None:
    if not passages:
        raise ConfigError("there are no passages to measure; the data has none.")


def _fit(passage: Passage, limit: int | None) -> Passage:
    """Return a passage whose tokens, without the last one, which is only predicted, fit the positions of a model."""
    if limit is None:
        return passage
    room = limit - (len(passage.word) - 1)
    if room < 1:
        raise ConfigError(
            f"a last word has {len(passage.word)} tokens, but the model has learned positions for max_length={limit}; "
            "use a model with a longer context."
        )
    return Passage(passage.context[-room:], passage.word)


def _places(passages: Sequence[Passage]) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and target of every token of a last word, int64 [M] each."""
    rows = [row for row, passage in enumerate(passages) for _ in passage.word]
    columns = [len(passage.context) - 1 + place for passage in passages for place in range(len(passage.word))]
    return torch.tensor(rows), torch.tensor(columns), torch.tensor([i for passage in passages for i in passage.word])


def _groups(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
