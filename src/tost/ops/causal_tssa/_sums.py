"""What the implementations of causal TSSA exchange: the three sums, and the bias and the count of every token.

Positions are settled before an implementation is called, so none of them has to know about padding on the left,
continued sequences or the length of the bias table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tost.ops._numerics import statistics_dtype
from tost.ops.causal_tssa._count import effective_count

__all__ = ["Sums", "bias_of_tokens", "count_of_tokens", "empty_sums"]


class Sums(NamedTuple):
    """The three sums of `TSSAState`, without the position."""

    squares: Tensor
    weighted_squares: Tensor
    mass: Tensor


def empty_sums(w: Tensor) -> Sums:
    """Return the sums before the first token of w [B, N, H, D]."""
    B, _, H, D = w.shape
    zeros = w.new_zeros((B, H, D), dtype=statistics_dtype(w.dtype))
    return Sums(zeros, zeros.clone(), zeros.new_zeros((B, H)))


def bias_of_tokens(bias: Tensor, num_tokens: int, mask: Tensor | None, position: Tensor | None) -> Tensor:
    """Look up the bias of every token in a table [H, L].

    Args:
        bias: The table, indexed by head and position.
        num_tokens: N.
        mask: Real tokens [B, N]; padding does not advance the position.
        position: Tokens seen before, [B]; None for a sequence that starts here.

    Returns:
        ``[B, N, H]``, or ``[1, N, H]`` where all sequences are alike.
    """
    if mask is None and position is None:
        return bias[:, :num_tokens].t().unsqueeze(0)
    return bias.t()[_index_of_tokens(bias, num_tokens, mask, position)]


def count_of_tokens(w: Tensor, mask: Tensor | None, position: Tensor | None, decay: Tensor | None) -> Tensor:
    """Return how many tokens stand behind the statistics of every token: those up to and including it.

    Args:
        w: The tokens, ``[B, N, H, D]``.
        mask: As in `bias_of_tokens`.
        position: As in `bias_of_tokens`.
        decay: Forgetting per head, ``[H]``: a token counts less with every token after it. None for none.

    Returns:
        ``[B, N, H]``, or ``[1, N, H]`` where all sequences are alike, in the dtype of the statistics; 1 for padding.
    """
    count = _index_of_tokens(w, w.shape[1], mask, position) + 1
    dtype = statistics_dtype(w.dtype)
    if decay is None:
        return count.to(dtype).unsqueeze(-1).expand(-1, -1, w.shape[2])
    return effective_count(decay.to(dtype), count)


def _index_of_tokens(like: Tensor, num_tokens: int, mask: Tensor | None, position: Tensor | None) -> Tensor:
    """Return every token's place in its sequence, int64 [B or 1, N]; 0 for padding."""
    index = torch.arange(num_tokens, device=like.device).unsqueeze(0) if mask is None else mask.cumsum(dim=1) - 1
    if position is not None:
        index = index + position.unsqueeze(1)
    return index if mask is None else index.where(mask, 0)
