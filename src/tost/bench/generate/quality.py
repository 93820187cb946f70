"""What fewer bits per weight cost: the loss of a trained model on a text, with its matrices rounded."""

from __future__ import annotations

from pathlib import Path

import torch

from tost._io import read_text
from tost.bench.generate.cases import Part
from tost.bench.generate.run import GenerateRow
from tost.errors import ConfigError
from tost.generation import ByteTokenizer
from tost.generation.decode import check_causal
from tost.generation.native import WEIGHTS, round_weights
from tost.models import LanguageToST
from tost.train.checkpoint.model import load_model
from tost.train.tokenizer import find_tokenizer


def measure_quality(source: Path, text: Path, *, tokens: int) -> list[GenerateRow]:
    """Measure the loss of a model for every way of storing its matrices.

    Args:
        source: A run, a checkpoint or a model folder.
        text: A file that the model has not been trained on.
        tokens: How many of its tokens to take.

    Returns:
        A row for each way, with the mean loss per token in nats.

    Raises:
        ConfigError: The file cannot be read or is too short, or the model is not a ToST language model.
        CheckpointError: The model cannot be read.
    """
    model = load_model(source)
    check_causal(model)
    if not isinstance(model, LanguageToST):
        raise ConfigError(f"{source} holds a {type(model).__name__}; its matrices cannot be rounded.")
    ids = _read(source, text, model.options.vocab_size)[:, : tokens + 1]
    rows = []
    for weights in WEIGHTS:
        rounded = load_model(source)
        round_weights(rounded, weights)
        loss = loss_of_text(rounded, ids)  # type: ignore[arg-type]
        tokens = ids.shape[1] - 1
        rows.append(GenerateRow(part=Part.QUALITY, contender=source.name, tokens=tokens, weights=weights, loss=loss))
    return rows


@torch.no_grad()
def loss_of_text(model: LanguageToST, ids: torch.Tensor) -> float:
    """Return the mean loss of predicting each token of a text ``[1, N + 1]`` from the window that it is in, in nats.

    Windows have the length that the model was made for, and follow each other.
    """
    length, total = model.options.max_length, 0.0
    for begin in range(0, ids.shape[1] - 1, length):
        piece = ids[:, begin : begin + length + 1]
        total += model.loss(piece[:, :-1], piece[:, 1:], reduction="sum").item()
    return total / (ids.shape[1] - 1)


def _read(source: Path, text: Path, vocab_size: int) -> torch.Tensor:
    tokenizer = find_tokenizer(source) or ByteTokenizer()
    ids = torch.tensor([tokenizer.encode(read_text(text))], dtype=torch.int64)
    if ids.shape[1] < 2:
        raise ConfigError(f"{text} has {ids.shape[1]} tokens; a loss needs at least 2.")
    if int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"{text} has ids up to {int(ids.max())}, but the model in {source} has {vocab_size}; it was trained with "
            "another tokenizer."
        )
    return ids
