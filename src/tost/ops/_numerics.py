"""The numerical conventions that every implementation of the operators shares.

The three floors are those of the authors' code, so that its checkpoints give the same numbers here. They act on
statistics, which are never held in less than float32: in half precision each of them would round to zero and the
operator would divide by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

SQUARE_FLOOR = 1e-24
"""Smallest sum of squares over all tokens (the norm is floored at 1e-12)."""

PREFIX_FLOOR = 1e-12
"""Smallest sum of squares over a prefix of tokens, in the causal operator."""

MASS_FLOOR = 1e-8
"""Added to the mass of a group, ``sum_n pi``, before dividing by it."""

GATE_FLOOR = 1e-20
"""Smallest mass by which a write gate is divided. Far below any gate of use, and its inverse is far from overflow."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums, memberships and states of `dtype` tokens are held."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def num_tokens(w: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of real tokens of every sequence of w [B, N, ...], int64 [B]."""
    return torch.full(w.shape[:1], w.shape[1], device=w.device) if mask is None else mask.sum(dim=1)


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [B, N, ...] with 0 where the mask [B, N] is False, whatever stood there, and no gradient to it."""
    if mask is None:
        return x
    return x.masked_fill(~mask.reshape(*mask.shape, *(1,) * (x.dim() - 2)), 0)
