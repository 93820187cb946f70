"""Surprise: how many bits each token of a text costs a language model, and what it expected instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tost.analysis.records import at_rest
from tost.analysis.result import Result

EXPECTED = 5
"""Tokens that are kept of what a model expected."""


@dataclass(frozen=True)
class Surprise(Result):
    """What a language model expected along a text.

    Attributes:
        tokens: The text, token by token.
        bits: ``-log2 p`` of each token given those before it, ``[N]``, float64. NaN for the first, which has none.
        expected: The likeliest tokens to follow each token, by id, ``[N, 5]``; those after the last are the forecast.
        probability: Their probabilities, ``[N, 5]``.
    """

    name: ClassVar[str] = "surprise"
    tokens: tuple[str, ...] = field(repr=False)
    bits: Tensor = field(repr=False)
    expected: Tensor = field(repr=False)
    probability: Tensor = field(repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per token."""
        pairs = zip(self.tokens, self.bits.tolist(), strict=True)
        return [{"position": i, "token": token, "bits": bits} for i, (token, bits) in enumerate(pairs)]

    def summary(self) -> dict[str, Any]:
        """Return the mean."""
        known = self.bits[1:]
        return {"tokens": len(self.tokens), "bits per token": round(known.mean().item(), 4) if len(known) else None}


def surprise(model: nn.Module, ids: Tensor, tokens: Sequence[str]) -> Surprise:
    """Measure how many bits each token of a text costs a language model.

    Args:
        model: A causal language model, with any kind of attention.
        ids: The text, int64 ``[1, N]`` or ``[N]``.
        tokens: How to write each of the N tokens.

    Raises:
        ValueError: There are not as many strings as tokens.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.load_pretrained("bytes-tiny")
        >>> text = "import os"
        >>> found = tost.analysis.surprise(model, torch.tensor(list(text.encode())), text)
        >>> found.bits.shape
        torch.Size([9])
    """
    ids = ids.reshape(1, -1) if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] != len(tokens):
        raise ValueError(f"ids have shape {tuple(ids.shape)} for {len(tokens)} tokens; one text is [1, N] or [N].")
    with at_rest(model):
        logits: Tensor = model(ids)
    log_probability = logits[0].double().log_softmax(dim=-1)  # [N, V]
    bits = -log_probability[:-1].gather(1, ids[0, 1:, None])[:, 0] / math.log(2)
    top = log_probability.topk(min(EXPECTED, log_probability.shape[-1]), dim=-1)
    unknown = torch.full((1,), math.nan, dtype=bits.dtype, device=bits.device)
    return Surprise(tuple(tokens), torch.cat((unknown, bits)).cpu(), top.indices.cpu(), top.values.exp().cpu())
