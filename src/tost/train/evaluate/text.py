"""Language models on texts that they were not trained on, or on their own validation set, by a protocol of choice.

A text is a split of a folder that `tost data prepare` made (``data.name=tokens``), or the embedded bytes. The split is
``data.options.validation_split``; the training split is not looked at, so a corpus without one will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from tost._progress import Report, silent
from tost.data import DataOptions, build_data
from tost.data.tokens.reader import TokenSplit, cbt_questions, check_tokenizer, lambada_pairs, open_tokens
from tost.errors import ConfigError
from tost.models import create_model, model_spec
from tost.train.config import RunConfig
from tost.train.device import DeviceChoice
from tost.train.distributed import Distributed
from tost.train.evaluate.last_word import Passage, score_choices, score_last_words, score_last_words_by_generation
from tost.train.evaluate.metrics import Evaluation, read_checkpoint, read_initial
from tost.train.evaluate.perplexity import Text, score_random, score_stream, score_windows
from tost.train.evaluate.protocol import Protocol, TextTest
from tost.train.task import Details
from tost.train.tokenizer import find_tokenizer

AUTHORS_WINDOWS = 16_000


class _Corpus(NamedTuple):
    """A text, and how long it is in units that do not depend on a tokenizer; None if unknown."""

    text: Text
    bytes: int | None
    words: int | None
    split: TokenSplit | None


def evaluate_text_checkpoint(
    checkpoint: Path,
    test: TextTest,
    *,
    overrides: Sequence[str],
    ema: bool,
    device: DeviceChoice = "auto",
    report: Report = silent,
) -> Evaluation:
    """Measure a checkpoint of a run.

    Arguments are those of `evaluate_checkpoint`, and:

    Args:
        test: What to measure.

    Raises:
        CheckpointError: As `evaluate_checkpoint` does.
        ConfigError: The text was prepared with another tokenizer than the training data, or cannot be measured so.
    """
    config, load = read_checkpoint(checkpoint, overrides=overrides, ema=ema)
    tokenizer = find_tokenizer(checkpoint)
    known = None if tokenizer is None else tokenizer.fingerprint
    return _evaluate(config, load, test, device, tokenizer=known, model=str(checkpoint), report=report)


def evaluate_text_initial(
    config: RunConfig, test: TextTest, *, device: DeviceChoice = "auto", report: Report = silent
) -> Evaluation:
    """Measure the weights that a run would start from, ``train.init_from``.

    Args:
        config: The run. Which tokenizer the weights belong to is not known, so only the number of ids is compared.
        test: What to measure.
        device: Where to compute; ``"auto"`` takes a GPU if there is one.
        report: Receives the progress.

    Raises:
        ConfigError: The configuration names no weights, or the text cannot be measured so.
        CheckpointError: The weights cannot be read, or belong to another model.
    """
    load, model = read_initial(config), str(config.train.init_from)
    return _evaluate(config, load, test, device, tokenizer=None, model=model, report=report)


def _evaluate(
    config: RunConfig,
    load: Callable[[nn.Module], object],
    test: TextTest,
    device: DeviceChoice,
    *,
    tokenizer: str | None,
    model: str,
    report: Report,
) -> Evaluation:
    if "language_modeling" not in (model_spec(config.model.name).tasks or ("language_modeling",)):
        raise ConfigError(
            f"the protocol {test.protocol} measures language models, but {config.model.name} is none; leave --protocol "
            "out."
        )
    corpus = _open(config.data)
    if corpus.split is not None:
        check_tokenizer(tokenizer, corpus.split.folder, model=model)
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
        ``word_perplexity``, which do not depend on the tokenizer. Or accuracies of last words or of choices.

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
    if test.protocol in (Protocol.last_word, Protocol.last_word_authors, Protocol.choices):
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
        nats = score.loss * tokens / corpus.words
        found["word_perplexity"] = math.exp(nats) if nats < 700 else math.inf
    return found


def _answers(model: nn.Module, split: TokenSplit | None, protocol: Protocol, batch: int) -> dict[str, float]:
    if split is None:
        raise ConfigError(
            f"the protocol {protocol} needs passages, which are the documents of a prepared folder; set "
            "data.name=tokens and data.path."
        )
    if protocol is Protocol.choices:
        questions = [([option.tolist() for option in options], answer) for options, answer in cbt_questions(split)]
        return score_choices(model, questions, before=split.folder.end_of_text)
    if protocol is Protocol.last_word:
        passages = [Passage(pair.context.tolist(), pair.word.tolist()) for pair in lambada_pairs(split)]
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
        text = build_data(data, seed=0).validation.tokens  # type: ignore[attr-defined]
        return _Corpus(text, len(text), None, None)
    raise ConfigError(f"data set {data.name!r} is no text; a protocol for texts measures tokens or stdlib_bytes.")
