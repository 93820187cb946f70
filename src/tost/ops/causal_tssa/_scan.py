"""Running sums that forget, in linear time and with whole tensors: ``total[n] = factor[n] * total[n-1] + x[n]``.

A blocked scan. All blocks walk their few tokens at the same time, from zero; the ends of the blocks are a sequence of
the same kind, only shorter; and what a block starts with fades within it by products of the factors. Factors are only
ever multiplied, so a product that underflows is a zero that was due, and no token meets one that comes after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["decay_of_tokens", "decayed_sums"]

# Tokens in a block: this many steps per level, of which there are log N / log _BLOCK.
_BLOCK = 16


def decay_of_tokens(decay: Tensor | None, num_tokens: int, mask: Tensor | None) -> Tensor | None:
    """Return by how much every token fades the sums before it, [B or 1, N, H, 1]: padding does not. None for None."""
    if decay is None:
        return None
    factors = decay.expand(1, num_tokens, -1) if mask is None else torch.where(mask.unsqueeze(-1), decay, 1)
    return factors.unsqueeze(-1)


def decayed_sums(x: Tensor, factors: Tensor, start: Tensor) -> Tensor:
    """Return the decayed sums up to every token.

    Args:
        x: What is summed, ``[B, N, H, F]``.
        factors: In [0, 1], ``[B or 1, N, H, 1]``.
        start: The sums before the first token, ``[B, H, F]``.
    """
    N = x.shape[1]
    if N <= _BLOCK:
        return _walk(x, factors, start, dim=1)
    blocks = -(-N // _BLOCK)
    missing = blocks * _BLOCK - N
    x, factors = (
        F.pad(y, (0, 0, 0, 0, 0, missing)).reshape(y.shape[0], blocks, _BLOCK, *y.shape[2:]) for y in (x, factors)
    )
    within = _walk(x, factors, None, dim=2)
    fading = factors.cumprod(dim=2)
    ends = decayed_sums(within[:, :, -1], fading[:, :, -1], start)
    starts = torch.cat((start.unsqueeze(1), ends[:, :-1]), dim=1)
    return torch.addcmul(within, fading, starts.unsqueeze(2)).flatten(1, 2)[:, :N]


def _walk(x: Tensor, factors: Tensor, total: Tensor | None, dim: int) -> Tensor:
    totals: list[Tensor] = []
    for token, factor in zip(x.unbind(dim), factors.unbind(dim), strict=True):
        total = token if total is None else torch.addcmul(token, factor, total)
        totals.append(total)
    return torch.stack(totals, dim) if totals else x
