"""Running sums, with and without forgetting, in linear time and by whole tensors: ``total[n] = a total[n-1] + x[n]``.

With forgetting it is a blocked scan. All blocks walk their few tokens at the same time, from zero; the ends of the
blocks are a sequence of the same kind, only shorter; and what a block starts with fades within it. Fading is always a
power of a with the number of real tokens as its exponent, found afresh and not as a product of products: its rounding
does not pile up. It may underflow, to a zero that was due, and nothing is divided by it. No token meets one that comes
after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens in a block: this many steps per level, of which there are log N / log _BLOCK.
_BLOCK = 16


def real_tokens(w: Tensor, mask: Tensor | None) -> Tensor:
    """Return 1 for a real token of w [B, N, ...] and 0 for padding, which makes nothing fade; int64 [B or 1, N]."""
    return torch.ones(1, w.shape[1], dtype=torch.int64, device=w.device) if mask is None else mask.long()


def prefix_sums(x: Tensor) -> Tensor:
    """Return the sums of x [B, N, H, F] up to every token.

    On GPUs torch has no deterministic cumulative sum, so where one is wanted a blocked scan takes its place.
    """
    if x.device.type != "cpu" and torch.are_deterministic_algorithms_enabled():
        return _blocked_sums(x, None, real_tokens(x, None), x.new_zeros(x.shape[0], *x.shape[2:]))
    return x.cumsum(dim=1)


def running_sums(x: Tensor, start: Tensor, decay: Tensor | None, tokens: Tensor | None) -> Tensor:
    """Return the sums up to every entry of x, after those before the first entry.

    Args:
        x: What is summed, ``[B, N, H, F]``.
        start: The sums before the first entry, ``[B, H, F]``.
        decay: In (0, 1], ``[H]``; None forgets nothing.
        tokens: How many tokens each entry stands for: the exponent of the decay, ``[B or 1, N]``. Not used without.
    """
    if decay is None:
        return start.unsqueeze(1) + prefix_sums(x)
    assert tokens is not None
    return _blocked_sums(x, decay, tokens, start)


def _blocked_sums(x: Tensor, decay: Tensor | None, tokens: Tensor, start: Tensor) -> Tensor:
    N = x.shape[1]
    if N <= _BLOCK:
        return _walk(x, decay, tokens, start, dim=1)
    blocks = -(-N // _BLOCK)
    missing = blocks * _BLOCK - N
    x = F.pad(x, (0, 0, 0, 0, 0, missing)).reshape(x.shape[0], blocks, _BLOCK, *x.shape[2:])
    tokens = F.pad(tokens, (0, missing)).reshape(tokens.shape[0], blocks, _BLOCK)
    within = _walk(x, decay, tokens, None, dim=2)
    ends = _blocked_sums(within[:, :, -1], decay, tokens.sum(dim=2), start)
    starts = torch.cat((start.unsqueeze(1), ends[:, :-1]), dim=1).unsqueeze(2)
    if decay is None:
        return (within + starts).flatten(1, 2)[:, :N]
    return torch.addcmul(within, _faded(decay, tokens.cumsum(dim=2)), starts).flatten(1, 2)[:, :N]


def _faded(decay: Tensor, tokens: Tensor) -> Tensor:
    return (decay ** tokens.unsqueeze(-1)).unsqueeze(-1)


def _walk(x: Tensor, decay: Tensor | None, tokens: Tensor, total: Tensor | None, dim: int) -> Tensor:
    totals: list[Tensor] = []
    factors = [None] * x.shape[dim] if decay is None else _faded(decay, tokens).unbind(dim)
    for entry, factor in zip(x.unbind(dim), factors, strict=True):
        if total is not None:
            entry = entry + total if factor is None else torch.addcmul(entry, factor, total)
        total = entry
        totals.append(entry)
    return torch.stack(totals, dim) if totals else x
