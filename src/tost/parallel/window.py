"""The last few tokens before a piece of a sequence, for layers that look back over a fixed distance.

Every rank sends its own last tokens, as many as such a layer can see, and how many tokens it has. From these each
rank picks what stands before its first token: often all from the rank before, from further back where pieces are short.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost.parallel._channel import Channel, untraced
from tost.parallel.context import ContextParallel, resolve


@untraced
def last_tokens(
    tail: Tensor, num_tokens: Tensor, start: Tensor, *, context: ContextParallel | None = None
) -> tuple[Tensor, Tensor]:
    """Return the last W tokens before this rank's piece, and those of the whole sequence.

    Each rank sends ``B W C`` numbers and ``B`` counts forward, and ``B W C`` numbers backward, in one collective
    each, whatever the length of the sequence. A loss that uses the second result must do so on every rank; its backward
    pass then takes one more.

    Args:
        tail: This rank's last W tokens, ``[B, W, C]``, the last one last; fewer than W are at the end, after anything.
        num_tokens: Number of tokens of this rank, int64 ``[B]``.
        start: The last W tokens before the whole sequence, ``[B, W, C]``, the same on every rank.
        context: The ranks that share the sequence; None for the active context.

    Returns:
        Two tensors ``[B, W, C]``; the second is the same on every rank.

    Raises:
        RuntimeError: No context was given and none is active.
    """
    channel = resolve(context).channel
    tails, counts = channel.gather(tail, num_tokens)
    choice = _choice(counts, tail.shape[1]).to(tail.dtype)
    sources = torch.cat((start.detach().unsqueeze(0), tails))
    before: Tensor = _Pick.apply(tail, start, sources, choice, channel, False)  # type: ignore[no-untyped-call]
    after: Tensor = _Pick.apply(tail, start, sources, choice, channel, True)  # type: ignore[no-untyped-call]
    return before, after


def _choice(counts: Tensor, reach: int) -> Tensor:
    """Return which entry of which source becomes which entry of which window, as zeros and ones.

    Args:
        counts: Tokens of every rank, ``[size, B]``.
        reach: W.

    Returns:
        bool ``[size + 1, size + 1, B, W, W]``: source (what came before all ranks, then the ranks), window (before each
        rank, then at the end), sequence, entry of the window, entry of the source.
    """
    ends = counts.cumsum(dim=0)
    source_ends = torch.cat((torch.zeros_like(ends[:1]), ends))
    available = torch.cat((torch.full_like(ends[:1], reach), counts))[:, None, :, None, None]
    window_begins = torch.cat((ends - counts, ends[-1:]))
    gap = (window_begins.unsqueeze(0) - source_ends.unsqueeze(1))[..., None, None]
    distance = torch.arange(reach, 0, -1, device=counts.device)  # from the end of a source, from the begin of a piece
    # No token of a later rank gets through: it would have to be further from its end than that rank has tokens.
    return (gap + distance == distance.unsqueeze(1)) & (distance <= available)


class _Pick(torch.autograd.Function):
    """A selection of entries, written as a product with zeros and ones; its derivative is the transposed one."""

    @staticmethod
    def forward(
        ctx: Any, tail: Tensor, start: Tensor, sources: Tensor, choice: Tensor, channel: Channel, last: bool
    ) -> Tensor:
        ctx.channel, ctx.last = channel, last
        ctx.save_for_backward(choice)
        return torch.einsum("sbji,sbic->bjc", choice[:, -1 if last else channel.rank], sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (choice,) = ctx.saved_tensors
        channel = ctx.channel
        (grads,) = channel.gather(grad)
        if ctx.last:
            own = torch.einsum("bji,bjc->bic", choice[channel.rank + 1, -1], grads.sum(dim=0))
        else:
            own = torch.einsum("rbji,rbjc->bic", choice[channel.rank + 1, :-1], grads)
        # What came before all ranks is held by each of them; here it gets this rank's part.
        start = torch.einsum("bji,bjc->bic", choice[0, -1 if ctx.last else channel.rank], grad)
        return own, start, None, None, None, None
