"""Gated statistics over ranks that share a sequence.

Weighted sums, ``mass (1, mean, S + mean mean^T)``, follow a linear recurrence whose factor over the tokens of a rank is
one minus the mass that they have alone. So each rank runs once from an empty state to find what it adds, the ranks
exchange that, and each runs again from the state where the rank before it ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops import GatedState, Packing
from tost.ops._blocks import products
from tost.ops._numerics import num_tokens
from tost.ops.functional import run_gated
from tost.parallel._autograd import sum_over_ranks
from tost.parallel._channel import Channel
from tost.parallel.recurrence import recurrence_ends


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
    """Return y of this rank's tokens, and the state after all ranks; arguments as in `run_gated`."""
    _, alone = run_gated(backend, packing, w, write, mask, None)
    S, H, K = alone.mass.shape
    g = w.shape[3] // K
    start = GatedState.empty(S, H, K * g, block_size=g, dtype=alone.mass.dtype, device=w.device)
    start = start if state is None else state
    kept = _spread(1 - alone.mass.double(), g)
    before, after = recurrence_ends(
        *(x.flatten(1) for x in (kept, _weighted_sums(alone, g), _weighted_sums(start, g))), channel=channel
    )
    tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    position = start.position + sum_over_ranks(tokens, channel)
    y, _ = run_gated(backend, packing, w, write, mask, _state_of(before, alone, g, start.position))
    return y, _state_of(after, alone, g, position)


def _spread(mass: Tensor, block_size: int) -> Tensor:
    """Return the mass ``[S, H, K]`` beside each weighted sum, ``[S, H, K + D + D(g+1)/2]``."""
    of_products = [mass.repeat_interleave(block_size - k, -1) for k in range(block_size)]
    return torch.cat((mass, mass.repeat_interleave(block_size, -1), *of_products), dim=-1)


def _weighted_sums(state: GatedState, block_size: int) -> Tensor:
    mean, covariance, mass = (x.double() for x in state[:3])
    return _spread(mass, block_size) * torch.cat(
        (torch.ones_like(mass), mean, covariance + products(mean, block_size)), dim=-1
    )


def _state_of(sums: Tensor, like: GatedState, block_size: int, position: Tensor) -> GatedState:
    sums = sums.reshape(*like.mass.shape[:2], -1)
    sizes = [like.mass.shape[2], like.mean.shape[2], like.covariance.shape[2]]
    mass, mean, products_of = torch.split(sums, sizes, dim=-1)
    weights = _spread(mass.clamp_min(torch.finfo(torch.float32).tiny), block_size)
    _, of_mean, of_products = torch.split(weights, sizes, dim=-1)
    mean = mean / of_mean
    covariance = products_of / of_products - products(mean, block_size)
    mean, covariance, mass = (x.to(like.mass.dtype) for x in (mean, covariance, mass))
    return GatedState(mean, covariance, mass, position)
