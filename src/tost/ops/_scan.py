"""Running sums and linear recurrences in linear time, by whole tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tost.ops._transforms import gradients, is_transformed, wants_graph


def prefix_sums(x: Tensor) -> Tensor:
    """Return the sums of x [B, N, H, F] up to every token.

    On GPUs torch has no deterministic cumulative sum, so where one is wanted a recurrence takes its place.
    """
    if x.device.type != "cpu" and torch.are_deterministic_algorithms_enabled():
        rows = x.flatten(2)
        return linear_recurrence(torch.ones_like(rows), rows, rows.new_zeros(len(rows), rows.shape[2])).reshape(x.shape)
    return x.cumsum(dim=1)


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
    size = max(1, int(math.sqrt(N)))  # a compiler does not know math.isqrt
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
    h = torch.addcmul(torch.stack(hidden, dim=2), torch.stack(kept, dim=2), before)
    return h.reshape(B, chunks * size, C).narrow(1, 0, N)


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
