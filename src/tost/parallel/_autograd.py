"""Collectives with derivatives. Every rank has its own loss, and the gradient is that of the sum of these losses.

So a sum over all ranks has a sum over all ranks as its derivative, a sum over the ranks before has a sum over the ranks
after, and what is handed to every rank collects the gradients of every rank. Each function here is linear, and its
derivative is made of the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tost.ops._numerics import statistics_dtype, zero_padding
from tost.parallel._channel import Channel, untraced


@untraced
def sum_over_ranks(x: Tensor, channel: Channel) -> Tensor:
    """Return the sum of x over the ranks, added in float32 or better, in the dtype of x."""
    if not x.is_floating_point():
        return channel.all_reduce(x)
    total: Tensor = _Sum.apply(x.to(statistics_dtype(x.dtype)), channel)  # type: ignore[no-untyped-call]
    return total.to(x.dtype)


def sum_of_gathered(x: Tensor, everyone: Tensor, channel: Channel) -> Tensor:
    """Return the sum over ranks of x, whose values `everyone` [size, ...] were gathered before: no exchange forward."""
    return _Total.apply(x, everyone, channel)  # type: ignore[no-untyped-call]


def exclusive_sum(x: Tensor, everyone: Tensor, channel: Channel) -> Tensor:
    """Return the sum of x over the ranks before this one; `everyone` [size, ...] was gathered before."""
    return _ExclusiveSum.apply(x, everyone, channel, False)  # type: ignore[no-untyped-call]


def gather_sums(x: Tensor, channel: Channel) -> Tensor:
    """Return what every rank has, x ``[size, ...]``.

    Unlike the functions above it sends the gradient of every rank's x back, in a sum over all ranks of ``[size, ...]``.
    """
    return _Gather.apply(x, channel)  # type: ignore[no-untyped-call]


def at_ranks(start: Tensor, everyone: Tensor, fading: Tensor) -> Tensor:
    """Return a sum where each rank begins, and after the last, ``[size + 1, ...]``.

    All of them, on every rank: so every rank takes part in the backward pass.

    Args:
        start: The sum before all ranks.
        everyone: What each rank adds, ``[size, ...]``.
        fading: What the sums before are multiplied by over its tokens, ``[size, ...]``.
    """
    totals = [start]
    for own, faded in zip(everyone, fading, strict=True):
        totals.append(faded * totals[-1] + own)
    return torch.stack(totals)


@untraced
def join_pieces(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """Return the pieces of all ranks joined along `dim`, on every rank; they may differ in length along it."""
    return _JoinPieces.apply(x, channel, dim)  # type: ignore[no-untyped-call]


def local_squares(w: Tensor, mask: Tensor | None) -> Tensor:
    """Return the sum of squares of this rank's real tokens, [B, H, D], keeping only w for the derivative."""
    return _LocalSquares.apply(w, mask)  # type: ignore[no-untyped-call]


def _add(parts: Tensor) -> Tensor:
    """Add the parts [ranks, ...] in rank order, in float64, so that every rank that adds them gets the same bits."""
    return parts.sum(dim=0, dtype=torch.float64).to(parts.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return channel.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.channel), None  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, everyone: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return _add(everyone)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad, ctx.channel), None, None  # type: ignore[no-untyped-call]


class _ExclusiveSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, everyone: Tensor | None, channel: Channel, after: bool) -> Tensor:
        ctx.channel, ctx.after = channel, after
        if everyone is None:
            (everyone,) = channel.gather(x)
        return _add(everyone[channel.rank + 1 :] if after else everyone[: channel.rank])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _ExclusiveSum.apply(grad, None, ctx.channel, not ctx.after), None, None, None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        (everyone,) = channel.gather(x)
        return everyone

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() and grad.requires_grad:
            # A rank without tokens may have no such graph, and the others would wait for it.
            raise RuntimeError(
                "second derivatives through a recurrence are not available on a sequence that is shared by ranks. "
                "Compute them in one process with backend='reference'."
            )
        return _Sum.apply(grad, ctx.channel)[ctx.channel.rank], None  # type: ignore[no-untyped-call]


class _JoinPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, dim: int) -> Tensor:
        (gathered,) = channel.gather(torch.tensor([x.shape[dim]], device=x.device))
        lengths: list[int] = gathered.flatten().tolist()
        ctx.channel, ctx.dim, ctx.start, ctx.length = channel, dim, sum(lengths[: channel.rank]), x.shape[dim]
        first = x.movedim(dim, 0)
        padding = first.new_zeros(max(lengths) - x.shape[dim], *first.shape[1:])
        (pieces,) = channel.gather(torch.cat((first, padding)))
        return torch.cat([piece[:n] for piece, n in zip(pieces, lengths, strict=True)]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_over_ranks(grad, ctx.channel).narrow(ctx.dim, ctx.start, ctx.length), None, None


class _LocalSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(w, mask)
        return accumulate(tokens_of(w, mask, rows).square().sum(dim=1) for rows in chunks(w))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        w, mask = ctx.saved_tensors
        return (tokens_of(w, mask, slice(None)) * (2 * grad).unsqueeze(1)).to(w.dtype), None


# --- A piece of a sequence, walked through in chunks: no temporary is as long as the piece

# Numbers in a chunk on a CPU: a handful of temporaries of this size stay in its cache.
_CHUNK_NUMEL = 1 << 16


def chunks(w: Tensor) -> list[slice]:
    """Return consecutive ranges that cover the tokens of w [B, N, H, D]; at least one, so that sums have a shape."""
    if w.device.type != "cpu":
        return [slice(0, w.shape[1])]
    length = max(1, _CHUNK_NUMEL // max(1, w.shape[0] * w.shape[2] * w.shape[3]))
    return [slice(start, start + length) for start in range(0, max(1, w.shape[1]), length)]


def tokens_of(x: Tensor, mask: Tensor | None, rows: slice) -> Tensor:
    """Return the tokens `rows` of x [B, N, H, D] in the dtype of the statistics, 0 where there is padding."""
    return zero_padding(x[:, rows].to(statistics_dtype(x.dtype)), None if mask is None else mask[:, rows])


def accumulate(parts: Iterable[Tensor]) -> Tensor:
    """Add the sums of the chunks in order and in float64, and return their total in their dtype."""
    total: Tensor | None = None
    for part in parts:
        total = part.double() if total is None else total.add_(part)
    assert total is not None
    return total.to(part.dtype)
