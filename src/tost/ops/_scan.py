"""Running sums, with and without forgetting, in linear time by whole tensors: ``total[n] = a[n] total[n-1] + x[n]``.

With forgetting it is a blocked scan. All blocks walk their few tokens at the same time, from zero; the ends of the
blocks are a sequence of the same kind, only shorter; and what a block starts with fades within it. Fading is a product
of decays, which may underflow, to a zero that was due: nothing is ever divided by it, and no logarithm is taken, so
that decays may be arbitrarily small, or zero. No token meets one that comes after it.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tost.ops._transforms import gradients, is_transformed, wants_graph

# Tokens in a block: this many steps per level, of which there are log N / log _BLOCK.
_BLOCK = 16


class Powers(NamedTuple):
    """One decay for all tokens: a fading is a power of it, found afresh, so that its rounding does not pile up.

    Attributes:
        decay: In (0, 1], ``[H]``.
        tokens: How many real tokens each entry stands for, int64 ``[B or 1, N]``: 0 for padding.
    """

    decay: Tensor
    tokens: Tensor

    def factors(self) -> Tensor:
        """Return what totals are multiplied by before each entry is added, ``[B or 1, N, H, 1]``."""
        return (self.decay ** self.tokens.unsqueeze(-1)).unsqueeze(-1)

    def of_real(self) -> Tensor:
        """Return the same for entries that are real tokens."""
        return self.decay.unsqueeze(-1)

    def flip(self) -> Powers:
        """Return the fading of the entries in reverse order."""
        return Powers(self.decay, self.tokens.flip(1))

    def in_blocks(self, missing: int) -> Powers:
        """Return the fading of entries in blocks, ``[B or 1, N / block, block]``, after `missing` more entries."""
        return Powers(self.decay, F.pad(self.tokens, (0, missing)).reshape(self.tokens.shape[0], -1, _BLOCK))

    def over_blocks(self) -> tuple[Tensor, Powers]:
        """Return the factors from the start of a block up to each entry, and the fading over whole blocks."""
        within = Powers(self.decay, self.tokens.cumsum(dim=2)).factors()
        return within, Powers(self.decay, self.tokens.sum(dim=2))


class Products(NamedTuple):
    """A decay for each token.

    Attributes:
        decay: In [0, 1], ``[B or 1, N, H, 1 or F]``, with 1 for padding.
    """

    decay: Tensor

    def factors(self) -> Tensor:
        """Return what totals are multiplied by before each entry is added, ``[B or 1, N, H, 1 or F]``."""
        return self.decay

    def of_real(self) -> Tensor:
        """Return the same."""
        return self.decay

    def flip(self) -> Products:
        """Return the fading of the entries in reverse order."""
        return Products(self.decay.flip(1))

    def in_blocks(self, missing: int) -> Products:
        """Return the fading of entries in blocks, ``[B or 1, N / block, block, H, 1 or F]``, as `Powers` does."""
        B, _, H, columns = self.decay.shape
        return Products(F.pad(self.decay, (0, 0, 0, 0, 0, missing), value=1).reshape(B, -1, _BLOCK, H, columns))

    def over_blocks(self) -> tuple[Tensor, Products]:
        """Return the factors from the start of a block up to each entry, and the fading over whole blocks."""
        # Neither torch's cumulative product nor the cumulative sum in its gradient has a deterministic form on GPUs.
        within = torch.stack([*accumulate(self.decay.unbind(2), torch.mul)], dim=2)
        return within, Products(within[:, :, -1])


Fading = Powers | Products


def real_tokens(w: Tensor, mask: Tensor | None) -> Tensor:
    """Return 1 for a real token of w [B, N, ...] and 0 for padding, which makes nothing fade; int64 [B or 1, N]."""
    return torch.ones(1, w.shape[1], dtype=torch.int64, device=w.device) if mask is None else mask.long()


def prefix_sums(x: Tensor) -> Tensor:
    """Return the sums of x [B, N, H, F] up to every token.

    On GPUs torch has no deterministic cumulative sum, so where one is wanted a blocked scan takes its place.
    """
    if x.device.type != "cpu" and torch.are_deterministic_algorithms_enabled():
        return _blocked_sums(x, None, x.new_zeros(x.shape[0], *x.shape[2:]))
    return x.cumsum(dim=1)


def running_sums(x: Tensor, start: Tensor, fading: Fading | None) -> Tensor:
    """Return the sums up to every entry of x, after those before the first entry.

    Args:
        x: What is summed, ``[B, N, H, F]``.
        start: The sums before the first entry, ``[B, H, F]``.
        fading: What they are multiplied by before each entry is added; None forgets nothing.
    """
    if fading is None:
        return start.unsqueeze(1) + prefix_sums(x)
    return _blocked_sums(x, fading, start)


def _blocked_sums(x: Tensor, fading: Fading | None, start: Tensor) -> Tensor:
    N = x.shape[1]
    if N <= _BLOCK:
        return _walk(x, fading, start, dim=1)
    blocks = -(-N // _BLOCK)
    missing = blocks * _BLOCK - N
    x = F.pad(x, (0, 0, 0, 0, 0, missing)).reshape(x.shape[0], blocks, _BLOCK, *x.shape[2:])
    fading = None if fading is None else fading.in_blocks(missing)
    within = _walk(x, fading, None, dim=2)
    if fading is None:
        ends = _blocked_sums(within[:, :, -1], None, start)
        return (within + _before(ends, start)).flatten(1, 2)[:, :N]
    faded, of_blocks = fading.over_blocks()
    ends = _blocked_sums(within[:, :, -1], of_blocks, start)
    return torch.addcmul(within, faded, _before(ends, start)).flatten(1, 2)[:, :N]


def _before(ends: Tensor, start: Tensor) -> Tensor:
    """Return the totals at the start of every block."""
    return torch.cat((start.unsqueeze(1), ends[:, :-1]), dim=1).unsqueeze(2)


def _walk(x: Tensor, fading: Fading | None, total: Tensor | None, dim: int) -> Tensor:
    totals: list[Tensor] = []
    factors = [None] * x.shape[dim] if fading is None else fading.factors().unbind(dim)
    for entry, factor in zip(x.unbind(dim), factors, strict=True):
        if total is not None:
            entry = entry + total if factor is None else torch.addcmul(entry, factor, total)
        total = entry
        totals.append(entry)
    return torch.stack(totals, dim) if totals else x


def linear_recurrence(factor: Tensor, value: Tensor, start: Tensor) -> Tensor:
    """Return h with ``h[n] = factor[n] h[n-1] + value[n]`` for all n.

    Args:
        factor: ``[B, N, C]``, in [0, 1].
        value: ``[B, N, C]``.
        start: h before the first token, ``[B, C]``.

    Returns:
        ``[B, N, C]``.
    """
    if torch.compiler.is_exporting():
        return _recurrence_of_any_length(factor, value, start)
    if value.shape[1] == 0:
        return value
    if value.shape[1] == 1:
        return torch.addcmul(value, factor, start.unsqueeze(1))
    run = _run_recurrence if is_transformed() else _LinearRecurrence.apply
    h: Tensor = run(factor, value, start)
    return h


def _recurrence_of_any_length(factor: Tensor, value: Tensor, start: Tensor) -> Tensor:
    """Return h as `linear_recurrence` does, in a graph that holds for every length."""
    from torch._higher_order_ops.scan import scan

    def step(h: Tensor, token: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h = torch.addcmul(token[1], token[0], h)
        return h, h.clone()  # outputs may not share memory

    tokens = (factor.transpose(0, 1), value.transpose(0, 1))
    return scan(step, start, tokens, dim=0)[1].transpose(0, 1)


def _run_recurrence(factor: Tensor, value: Tensor, start: Tensor) -> Tensor:
    """Return h as `linear_recurrence` does.

    The sequence is cut into about as many chunks as each has tokens. All chunks are run through at once, token by
    token, from zero; then what enters each chunk is carried from one to the next, and added to its tokens.
    """
    B, N, C = value.shape
    size = max(1, math.isqrt(N))
    chunks = -(-N // size)
    factors, values = (
        F.pad(part, (0, 0, 0, chunks * size - N)).reshape(B, chunks, size, C).unbind(2) for part in (factor, value)
    )
    hidden, kept = [values[0]], [factors[0]]
    for a, v in zip(factors[1:], values[1:], strict=True):
        hidden.append(torch.addcmul(v, a, hidden[-1]))
        kept.append(a * kept[-1])
    enters = [start]
    for last, share in zip(hidden[-1].unbind(1)[:-1], kept[-1].unbind(1)[:-1], strict=True):
        enters.append(torch.addcmul(last, share, enters[-1]))
    before = torch.stack(enters, dim=1).unsqueeze(2)
    return torch.addcmul(torch.stack(hidden, dim=2), torch.stack(kept, dim=2), before).flatten(1, 2)[:, :N]


class _LinearRecurrence(torch.autograd.Function):
    """The gradient is a recurrence from the last token to the first; torch's own takes several times as long."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, value: Tensor, start: Tensor) -> Tensor:
        h = _run_recurrence(factor, value, start)
        ctx.save_for_backward(factor, value, start, h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, value, start, h = ctx.saved_tensors
        if wants_graph():
            return gradients(_run_recurrence, (factor, value, start), grad)
        later = F.pad(factor[:, 1:], (0, 0, 0, 1))
        d_value = _run_recurrence(later.flip(1), grad.flip(1), torch.zeros_like(start)).flip(1)
        before = torch.cat((start.unsqueeze(1), h[:, :-1]), dim=1)
        return d_value * before, d_value, factor[:, 0] * d_value[:, 0]
