"""How well a language model predicts a text: the loss per token under different ways of cutting the text into pieces.

All of them score ``text[1:]``, at most once per token unless pieces are drawn at random; they differ in how much of the
text before it a token is predicted from:

================  =====================================================================
`score_windows`   between ``length - stride`` and ``length`` tokens; with ``stride = length``
                  the text is cut into blocks, and no block sees the one before
`score_random`    blocks at random places, as nanoGPT and the authors measure
`score_stream`    everything from the first token on, carried by the state of the model
================  =====================================================================

Shapes: text [T], ids [B, N], features [B, N, C].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost._progress import Report, silent
from tost.errors import ConfigError
from tost.generation.decode import CHUNK_SIZE, check_causal, context_limit, evaluating

IGNORED = -100
_LOGITS_AT_ONCE = 1 << 23
"""Numbers of a piece of logits: 32 MiB in float32."""


class Text(Protocol):
    """Token ids ``[T]`` of any integer type, such as a tensor, an array, or files of tokens.

    Only as much of it is read at a time as the model reads.
    """

    def __len__(self) -> int:
        """Return T."""

    def __getitem__(self, piece: slice, /) -> Any:
        """Return a piece, as a tensor or as an array."""


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

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that is too large for a number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """Return the bits that the model needs per byte of the text.

        Args:
            bytes_per_token: Bytes of the whole text over its number of tokens. The result then does not depend on
                which tokens were scored, and models with different vocabularies can be compared.
        """
        return self.loss / math.log(2) / bytes_per_token

    def metrics(self, bytes_per_token: float | None = None) -> dict[str, float]:
        """Return everything by name; bits per byte if the bytes are known."""
        found = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_token": self.loss / math.log(2)}
        if bytes_per_token is not None:
            found["bits_per_byte"] = self.bits_per_byte(bytes_per_token)
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
        batch_size: Windows at a time; changes nothing but speed and memory.
        report: Told after each batch.

    Raises:
        ConfigError: A window does not fit into the text or into the model, or the stride leaves gaps.

    Example:
        >>> import torch, tost
        >>> from tost.train.evaluate.perplexity import score_windows
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
        report: Told after each batch.

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
    size. Models with softmax attention remember every token instead, which takes memory, and time for each of them.

    Args:
        model: A causal language model without a limit on the length, or with one that the text keeps.
        text: Token ids, ``[T]`` with T > 1.
        chunk_size: Tokens that are read at once; changes nothing but speed and memory.
        report: Told after each chunk.

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
            "cannot read the text in one stream; use sliding windows, or a model with position=none or "
            "after_last_position=repeat."
        )
    device, state, nats = next(model.parameters()).device, None, 0.0
    with torch.no_grad(), evaluating(model):
        for begin in range(0, targets, chunk_size):
            piece = _cut(text, begin, min(begin + chunk_size, targets) + 1, device)
            x, state = network.features_with_state(piece[None, :-1], state)
            nats += _feature_loss(network, x[0], piece[1:])
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


def _feature_loss(network: Any, x: Tensor, targets: Tensor) -> float:
    """Return the summed loss of outputs of the last block, [N, C], without holding all their logits."""
    total, rows = 0.0, max(1, _LOGITS_AT_ONCE // network.options.vocab_size)
    for begin in range(0, len(x), rows):
        logits: Tensor = network.logits(x[begin : begin + rows])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total += float(F.cross_entropy(wide, targets[begin : begin + rows], reduction="sum"))
    return total


def _cut(text: Text, begin: int, end: int, device: torch.device) -> Tensor:
    """Return a piece of the text, int64."""
    piece = text[begin:end]
    ids = torch.from_numpy(piece.astype(np.int64)) if isinstance(piece, np.ndarray) else cast(Tensor, piece)
    return ids.to(device, torch.int64)
