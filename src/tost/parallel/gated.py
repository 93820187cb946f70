"""Gated statistics over ranks that share a sequence.

The weighted sums ``mass (1, mean, S + mean mean^T)`` follow a linear recurrence, whose factor over the tokens of a rank
is one minus the mass that these have alone. So each rank runs once from an empty state to find what it adds, the ranks
exchange that, and each runs again from the state where the rank before it ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops import GatedState, Packing
from tost.ops._blocks import products
from tost.ops._numerics import GATE_FLOOR, num_tokens
from tost.ops.functional import run_gated
from tost.parallel._autograd import at_ranks, gather_sums, sum_over_ranks
from tost.parallel._channel import Channel, untraced


@untraced
def gated_tssa(
    backend: str,
    packing: Packing | None,
    w: Tensor,
    write: Tensor,
    mask: Tensor | None,
    state: GatedState | None,
    *,
    channel: Channel,
) -> tuple[Tensor, GatedState]:
    """Return y of this rank's tokens, and the state after all ranks; arguments as in `run_gated`.

    Each rank sends ``8 B H (D + D(g+1)/2 + D/g) + 8 B`` bytes forward, in two collectives, and the first term for every
    rank backward, in one, whatever the length of the sequence. For packed sequences B is their number S.
    """
    g = w.shape[3] // write.shape[3]
    _, alone = run_gated(backend, packing, w, write, mask, None)
    start = GatedState(*map(torch.zeros_like, alone)) if state is None else state
    own = _weighted_sums(alone, g)
    if w.shape[1] == 0:  # adds nothing, but this rank has to take part in the backward pass
        own = own + w.sum() + write.sum()
    everyone = gather_sums(own, channel)
    K = write.shape[3]
    ends = at_ranks(_weighted_sums(start, g), everyone, _spread(1 - everyone[..., :K], g))
    tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    position = start.position + sum_over_ranks(tokens, channel)
    y, _ = run_gated(backend, packing, w, write, mask, _state_of(ends[channel.rank], alone, g, start.position))
    y = y + ends.sum().to(y.dtype) if w.shape[1] == 0 else y
    return y, _state_of(ends[-1], alone, g, position)


def _spread(mass: Tensor, block_size: int) -> Tensor:
    """Return the mass ``[..., K]`` beside each weighted sum, ``[..., K + D + D(g+1)/2]``."""
    of_products = [mass.repeat_interleave(block_size - k, -1) for k in range(block_size)]
    return torch.cat((mass, mass.repeat_interleave(block_size, -1), *of_products), dim=-1)


def _weighted_sums(state: GatedState, block_size: int) -> Tensor:
    mean, covariance, mass = (x.double() for x in state[:3])
    parts = (torch.ones_like(mass), mean, covariance + products(mean, block_size))
    return _spread(mass, block_size) * torch.cat(parts, dim=-1)


def _state_of(sums: Tensor, like: GatedState, block_size: int, position: Tensor) -> GatedState:
    sizes = [x.shape[-1] for x in (like.mass, like.mean, like.covariance)]
    mass, mean, second = torch.split(sums, sizes, dim=-1)
    _, of_mean, of_second = torch.split(_spread(mass.clamp_min(GATE_FLOOR), block_size), sizes, dim=-1)
    mean = mean / of_mean
    covariance = second / of_second - products(mean, block_size)
    mean, covariance, mass = (x.to(like.mass.dtype) for x in (mean, covariance, mass))
    return GatedState(mean, covariance, mass, position)
