"""Running sums that forget, in linear time and with whole tensors: ``total[n] = a * total[n-1] + x[n]``.

A blocked scan. All blocks walk their few tokens at the same time, from zero; the ends of the blocks are a sequence of
the same kind, only shorter; and what a block starts with fades within it. Fading is always a power of a with the number
of real tokens as its exponent, found afresh and not as a product of products: its rounding does not pile up. It may
underflow, to a zero that was due, and nothing is divided by it. No token meets one that comes after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["decayed_sums", "real_tokens"]

# Tokens in a block: this many steps per level, of which there are log N / log _BLOCK.
_BLOCK = 16


def real_tokens(w: Tensor, mask: Tensor | None) -> Tensor:
    """Return 1 for a real token of w [B, N, ...] and 0 for padding, which makes nothing fade; int64 [B or 1, N]."""
    return torch.ones(1, w.shape[1], dtype=torch.int64, device=w.device) if mask is None else mask.long()


def decayed_sums(x: Tensor, decay: Tensor, tokens: Tensor, start: Tensor) -> Tensor:
    """Return the decayed sums up to every entry of x.

    Args:
        x: What is summed, ``[B, N, H, F]``.
        decay: In (0, 1], ``[H]``.
        tokens: How many tokens each entry stands for: the exponent of the decay, ``[B or 1, N]``.
        start: The sums before the first entry, ``[B, H, F]``.
    """
    N = x.shape[1]
    if N <= _BLOCK:
        return _walk(x, _faded(decay, tokens), start, dim=1)
    blocks = -(-N // _BLOCK)
    missing = blocks * _BLOCK - N
    x = F.pad(x, (0, 0, 0, 0, 0, missing)).reshape(x.shape[0], blocks, _BLOCK, *x.shape[2:])
    tokens = F.pad(tokens, (0, missing)).reshape(tokens.shape[0], blocks, _BLOCK)
    within = _walk(x, _faded(decay, tokens), None, dim=2)
    ends = decayed_sums(within[:, :, -1], decay, tokens.sum(dim=2), start)
    starts = torch.cat((start.unsqueeze(1), ends[:, :-1]), dim=1)
    return torch.addcmul(within, _faded(decay, tokens.cumsum(dim=2)), starts.unsqueeze(2)).flatten(1, 2)[:, :N]


def _faded(decay: Tensor, tokens: Tensor) -> Tensor:
    return (decay ** tokens.unsqueeze(-1)).unsqueeze(-1)


def _walk(x: Tensor, factors: Tensor, total: Tensor | None, dim: int) -> Tensor:
    totals: list[Tensor] = []
    for entry, factor in zip(x.unbind(dim), factors.unbind(dim), strict=True):
        total = entry if total is None else torch.addcmul(entry, factor, total)
        totals.append(total)
    return torch.stack(totals, dim) if totals else x
