"""Language models on texts: the loss under different ways of cutting a text into pieces, and predicted words.

All scores of a text are of ``text[1:]``, at most once per token unless pieces are drawn at random; they differ in how
much of the text before it a token is predicted from:

================  =====================================================================
`score_windows`   between ``length - stride`` and ``length`` tokens; with ``stride = length``
                  the text is cut into blocks, each without the one before
`score_random`    blocks at random places, as nanoGPT and the authors measure
`score_stream`    everything from the first token on, carried by the state of the model
================  =====================================================================

Two protocols exist for the last words of passages (LAMBADA) and give different numbers:

``usual``    the word is right if each of its tokens is the model's likeliest one, given the passage and the tokens
             before it; the perplexity is over words, ``exp(mean of -log p(word))``
``authors``  ten tokens are generated greedily after a line break and the passage; the word is right if it occurs in
             their text, whatever its case and wherever it stands

Shapes: text [T], ids [B, N], features [B, N, C].
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost._machine import DeviceChoice
from tost._progress import Report, silent
from tost.data import DataOptions, build_data
from tost.data.tokens.reader import TokenSplit, check_tokenizer, lambada_pairs, open_tokens
from tost.errors import ConfigError
from tost.generation import Sampling, generate_with_state
from tost.generation.decode import CHUNK_SIZE, check_causal, context_limit, evaluating
from tost.models import create_model, model_spec
from tost.train.config import RunConfig
from tost.train.distributed import Distributed
from tost.train.evaluate import Protocol, TextTest
from tost.train.evaluate.metrics import Evaluation
from tost.train.task import Details
from tost.train.tokenizer import find_tokenizer

IGNORED = -100
_LOGITS_AT_ONCE = 1 << 23
"""Numbers of a piece of logits: 32 MiB in float32."""


class Text(typing.Protocol):
    """Token ids ``[T]`` of any integer type, such as a tensor, an array, or files of tokens.

    Only as much of it is read at a time as the model reads.
    """

    def __len__(self) -> int:
        """Return T."""

    def __getitem__(self, piece: slice, /) -> Any:
        """Return a piece, as a tensor or as an array."""


def _perplexity(nats: float) -> float:
    """Return ``exp(nats)``; infinite where that is too large for a number."""
    return math.exp(nats) if nats < 700 else math.inf


class Score(NamedTuple):
    """The predictions of a model on a text, added up.

    Attributes:
        nats: Cross-entropy, summed over the predicted tokens.
        tokens: How many those are.
        error: Standard error of the mean, where pieces were drawn at random; None where every token was scored.
    """

    nats: float
    tokens: int
    error: float | None = None

    @property
    def loss(self) -> float:
        """Cross-entropy per token in nats."""
        return self.nats / self.tokens

    def metrics(self, bytes_per_token: float | None = None) -> dict[str, float]:
        """Return everything by name.

        Args:
            bytes_per_token: Bytes of the whole text over its number of tokens, for the bits per byte. They do not
                depend on which tokens were scored, and compare models with different vocabularies.
        """
        bits = self.loss / math.log(2)
        found = {"loss": self.loss, "perplexity": _perplexity(self.loss), "bits_per_token": bits}
        if bytes_per_token is not None:
            found["bits_per_byte"] = bits / bytes_per_token
        if self.error is not None:
            found["loss_error"] = self.error
        return {**found, "tokens": float(self.tokens)}


def score_windows(
    model: nn.Module,
    text: Text,
    *,
    length: int,
    stride: int | None = None,
    batch_size: int = 8,
    report: Report = silent,
) -> Score:
    """Score every token of a text once, in windows that overlap.

    Windows begin at 0, `stride`, 2 `stride` and so on. The first scores all its targets, each other one only those that
    no window before it has scored, so each of these is predicted from more than ``length - stride`` tokens. The last
    window ends with the text and may be shorter.

    Args:
        model: A causal language model.
        text: Token ids, ``[T]`` with T > length.
        length: Tokens that the model reads at once.
        stride: Distance between windows, at most `length`; None for `length`, which gives blocks side by side.
        batch_size: Windows at a time; affects only speed and memory.
        report: Receives the progress after each batch.

    Raises:
        ConfigError: A window does not fit into the text or into the model, or the stride leaves gaps.

    Example:
        >>> import torch, tost
        >>> from tost.train.evaluate.text import score_windows
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> score_windows(model, torch.randint(256, (1000,)), length=128, stride=64).tokens
        999
    """
    stride = length if stride is None else stride
    _check_length(model, text, length)
    if not 1 <= stride <= length:
        raise ConfigError(f"stride={stride} does not fit windows of {length} tokens; it needs 1 to {length}.")
    targets = len(text) - 1
    full = (targets - length) // stride + 1
    nats = 0.0
    for first in range(0, full, batch_size):
        begins = [index * stride for index in range(first, min(first + batch_size, full))]
        nats += _window_loss(model, text, begins, length, fresh=stride)
        report(first + len(begins), full)
    covered = (full - 1) * stride + length
    if covered < targets:
        begin = full * stride
        nats += _window_loss(model, text, [begin], targets - begin, fresh=targets - covered)
    return Score(nats, targets)


def score_random(
    model: nn.Module,
    text: Text,
    *,
    length: int,
    windows: int = 16_000,
    batch_size: int = 16,
    seed: int = 0,
    report: Report = silent,
) -> Score:
    """Score windows at random places, drawn with replacement: the protocol of nanoGPT and of the authors.

    Args:
        model: A causal language model.
        text: Token ids, ``[T]`` with T > length.
        length: Tokens of a window.
        windows: How many windows.
        batch_size: Windows at a time; the last batch may be smaller.
        seed: Decides where the windows lie.
        report: Receives the progress after each batch.

    Returns:
        The mean over all windows, with the standard error that the drawing causes.

    Raises:
        ConfigError: A window does not fit into the text or into the model.
    """
    _check_length(model, text, length)
    generator = torch.Generator().manual_seed(seed)
    sums = []
    for first in range(0, windows, batch_size):
        count = min(batch_size, windows - first)
        begins = torch.randint(len(text) - length, (count,), generator=generator).tolist()
        sums.append(_window_loss(model, text, begins, length, fresh=length))
        report(first + count, windows)
    whole = [value / (batch_size * length) for value in sums[: windows // batch_size]]
    error = stdev(whole) / math.sqrt(windows / batch_size) if len(whole) > 1 else None
    return Score(math.fsum(sums), windows * length, error)


def score_stream(model: nn.Module, text: Text, *, chunk_size: int = CHUNK_SIZE, report: Report = silent) -> Score:
    """Score every token of a text once, each predicted from all tokens before it, in one pass.

    The model's state is carried along, so the time is linear in the length of the text where the state is of constant
    size. Models with softmax attention keep every token instead, which takes memory, and time for each of them.

    Args:
        model: A causal language model without a limit on the length, or with one that the text keeps.
        text: Token ids, ``[T]`` with T > 1.
        chunk_size: Tokens that are read at once; affects only speed and memory.
        report: Receives the progress after each chunk.

    Raises:
        ConfigError: The text has no second token, or is longer than the positions of the model.
    """
    network: Any = check_causal(model)
    limit, targets = context_limit(model), len(text) - 1
    if targets < 1:
        raise ConfigError(f"the text has {len(text)} tokens; at least 2 are needed, one to read and one to predict.")
    if limit is not None and targets > limit:
        raise ConfigError(
            f"the text has {len(text):,} tokens, but the model has learned positions for max_length={limit}, so it "
            "cannot read the text in one stream; use sliding windows, or a model with position=none."
        )
    device, state, nats = next(model.parameters()).device, None, 0.0
    rows = max(1, _LOGITS_AT_ONCE // network.options.vocab_size)  # a chunk's logits are never held all at once
    with torch.no_grad(), evaluating(model):
        for begin in range(0, targets, chunk_size):
            piece = _cut(text, begin, min(begin + chunk_size, targets) + 1, device)
            x, state = network.features_with_state(piece[None, :-1], state)
            for hidden, words in zip(torch.split(x[0], rows), torch.split(piece[1:], rows), strict=True):
                nats += float(F.cross_entropy(_wide(network.logits(hidden)), words, reduction="sum"))
            report(begin + len(piece) - 1, targets)
    return Score(nats, targets)


def _check_length(model: nn.Module, text: Text, length: int) -> None:
    limit = context_limit(model)
    if length < 1:
        raise ConfigError(f"a window of {length} tokens cannot be read; it needs at least 1.")
    if limit is not None and length > limit:
        raise ConfigError(
            f"windows of {length} tokens do not fit the model, which has learned positions for max_length={limit}; "
            f"use {limit} or less."
        )
    if len(text) <= length:
        raise ConfigError(
            f"the text has {len(text)} tokens, but a window of {length} and the token after it need {length + 1}; "
            f"use a longer text, or windows of at most {max(len(text) - 1, 0)} tokens."
        )


def _window_loss(model: nn.Module, text: Text, begins: Sequence[int], length: int, *, fresh: int) -> float:
    """Return the summed loss over the last `fresh` targets of windows; over all targets of one that begins at 0."""
    device = next(model.parameters()).device
    windows = torch.stack([_cut(text, begin, begin + length + 1, device) for begin in begins])
    targets = windows[:, 1:].clone()
    for row, begin in enumerate(begins):
        if begin > 0:
            targets[row, : length - fresh] = IGNORED
    with torch.no_grad(), evaluating(model):
        return float(model(windows[:, :-1].contiguous(), targets=targets))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _cut(text: Text, begin: int, end: int, device: torch.device) -> Tensor:
    """Return a piece of the text, int64."""
    piece = text[begin:end]
    ids = torch.from_numpy(piece.astype(np.int64)) if isinstance(piece, np.ndarray) else cast(Tensor, piece)
    return ids.to(device, torch.int64)


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
            found["last_word_perplexity"] = _perplexity(self.nats / self.passages)
            found["last_word_loss"] = self.nats / self.word_tokens
        return {**found, "passages": float(self.passages)}


def score_last_words(model: nn.Module, passages: Sequence[Passage], *, batch_size: int = 8) -> LastWords:
    """Measure by the usual protocol.

    A context that is longer than the model's positions loses its beginning.

    Args:
        model: A causal language model.
        passages: Whose last words to predict.
        batch_size: Passages at a time; affects only speed and memory.

    Raises:
        ConfigError: There are no passages, or a word alone is longer than the model's positions.

    Example:
        >>> import tost
        >>> from tost.train.evaluate.text import Passage, score_last_words
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
            # Padded at the end: no earlier token attends to padding.
            read = [torch.tensor([*passage.context, *passage.word[:-1]], device=device) for passage in group]
            features, _ = network.features_with_state(nn.utils.rnn.pad_sequence(read, batch_first=True))
            wide = _wide(network.logits(features[rows, columns]))
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
        batch_size: Passages at a time; affects only speed and memory.

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


AUTHORS_WINDOWS = 16_000


class _Corpus(NamedTuple):
    """A text, and how long it is in units that do not depend on a tokenizer; None if unknown."""

    text: Text
    bytes: int | None
    words: int | None
    split: TokenSplit | None


def evaluate_on_text(
    config: RunConfig,
    load: Callable[[nn.Module], object],
    test: TextTest,
    device: DeviceChoice,
    report: Report,
    *,
    source: Path | None = None,
) -> Evaluation:
    """Build the model of a configuration, load its weights and measure it on a text.

    Args:
        config: The run.
        load: Fills the model with weights.
        test: What to measure.
        device: Where to compute.
        report: Receives the progress.
        source: Checkpoint, whose tokenizer the text must have; None to compare only the number of ids.

    Raises:
        ConfigError: The text was prepared with another tokenizer than the training data, or cannot be measured so.
    """
    if "language_modeling" not in (model_spec(config.model.name).tasks or ("language_modeling",)):
        raise ConfigError(
            f"the protocol {test.protocol} measures language models, but {config.model.name} is none; leave --protocol "
            "out."
        )
    corpus = _open(config.data)
    if corpus.split is not None:
        tokenizer = None if source is None else find_tokenizer(source)
        known = None if tokenizer is None else tokenizer.fingerprint
        check_tokenizer(known, corpus.split.folder, model=str(source or config.train.init_from))
    with Distributed.join(config, device=device) as processes:
        if processes.size > 1:
            raise ConfigError(f"{processes.size} processes cannot share this measurement; start one.")
        network = create_model(config.model.name, **config.model.options)
        load(network)
        with processes.context():
            return evaluate_text(network.to(processes.device), config, test, report=report)


def evaluate_text(model: nn.Module, config: RunConfig, test: TextTest, *, report: Report = silent) -> Evaluation:
    """Measure a model on the text of a configuration.

    Args:
        model: A causal language model.
        config: ``data`` names the text, ``evaluate.batch_size`` is how much of it is read at once.
        test: What to measure.
        report: Receives the progress of a loss.

    Returns:
        Metrics: ``loss`` per token in nats, ``perplexity``, ``bits_per_token``; ``bits_per_byte`` and
        ``word_perplexity``, which do not depend on the tokenizer. Or accuracies of last words.

    Raises:
        ConfigError: The data is no text, has ids that the model does not know, or cannot be measured so.
    """
    corpus = _open(config.data)
    known: Any = model.options
    size = 256 if corpus.split is None else corpus.split.folder.vocab_size
    if size > known.vocab_size:
        where = "the text" if corpus.split is None else str(corpus.split.folder.path)
        raise ConfigError(
            f"{where} has {size} different ids, but the model has {known.vocab_size}; prepare the text with the "
            "tokenizer of the model's training data."
        )
    batch = config.evaluate.batch_size or config.train.batch_size
    if test.protocol in (Protocol.last_word, Protocol.last_word_authors):
        metrics = _answers(model, corpus.split, test.protocol, batch)
    else:
        metrics = _losses(model, corpus, config, test, batch, report)
    described = {"data": "stdlib_bytes"}
    if corpus.split is not None:
        folder = corpus.split.folder
        described = {"data": folder.name, "split": corpus.split.name, "fingerprint": folder.fingerprint}
    return Evaluation(metrics, Details({"protocol": str(test.protocol), **described}), {}, ())


def _losses(
    model: nn.Module, corpus: _Corpus, config: RunConfig, test: TextTest, batch: int, report: Report
) -> dict[str, float]:
    length = test.length or config.data.shape().length or 1
    match test.protocol:
        case Protocol.stream:
            score = score_stream(model, corpus.text, report=report)
        case Protocol.authors:
            windows = test.windows or min(AUTHORS_WINDOWS, math.ceil(len(corpus.text) / length))
            drawn = {"windows": windows, "batch_size": batch, "seed": config.train.seed}
            score = score_random(model, corpus.text, length=length, report=report, **drawn)
        case _:
            stride = (test.stride or max(1, length // 2)) if test.protocol is Protocol.sliding else length
            score = score_windows(model, corpus.text, length=length, stride=stride, batch_size=batch, report=report)
    tokens = len(corpus.text)
    found = score.metrics(None if not corpus.bytes else corpus.bytes / tokens)
    if corpus.words:
        found["word_perplexity"] = _perplexity(score.loss * tokens / corpus.words)
    return found


def _answers(model: nn.Module, split: TokenSplit | None, protocol: Protocol, batch: int) -> dict[str, float]:
    if split is None:
        raise ConfigError(
            f"the protocol {protocol} needs passages, which are the documents of a prepared folder; set "
            "data.name=tokens and data.path."
        )
    if protocol is Protocol.last_word:
        passages = [Passage(context, word) for context, word in lambada_pairs(split)]
        return score_last_words(model, passages, batch_size=batch).metrics()
    tokenizer = split.folder.tokenizer()
    texts = [tokenizer.decode(split.document(number).tolist()) for number in range(len(split.documents) - 1)]
    score = score_last_words_by_generation(model, texts, tokenizer.encode, tokenizer.decode, batch_size=batch)
    return score.metrics()


def _open(data: DataOptions) -> _Corpus:
    if data.name == "tokens":
        split = open_tokens(data.path or "").split(data.options["validation_split"])
        return _Corpus(split.tokens, split.source_bytes, split.source_words, split)
    if data.name == "stdlib_bytes":
        text = build_data(data, seed=0).validation.tokens.text  # type: ignore[attr-defined]
        return _Corpus(text, len(text), None, None)
    raise ConfigError(f"data set {data.name!r} is no text; a protocol for texts measures tokens or stdlib_bytes.")
