"""Linear attention: the mixer of the Linear Transformer, and the product that attention by features comes down to.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D, features [B, N, H, F], mask [B, N].
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from tost.nn.mixers.projected import LinearProjections, ProjectedMixer
from tost.ops._numerics import statistics_dtype, zero_padding

FLOOR = 1e-30
"""Smallest normalizer. Only a sequence of padding alone comes near it."""


def feature_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, eps: float = 0.0) -> Tensor:
    """Attend with weights that are products of features, without ever forming them.

    .. code-block:: text

        y[n,h] = sum_m (q[n,h] . k[m,h]) v[m,h] / ( sum_m q[n,h] . k[m,h] + eps )

    The sums over m are taken first, so time and memory are linear in the number of tokens.

    Args:
        query: Features of the queries, none of them negative, ``[B, N, H, F]``.
        key: Features of the keys, none of them negative, ``[B, N, H, F]``.
        value: ``[B, N, H, D]``, of any floating point dtype.
        mask: Real tokens, bool ``[B, N]``; the others do not count.
        eps: Added to the normalizer.

    Returns:
        ``[B, N, H, D]``, of the dtype of `value`.
    """
    key = zero_padding(key, mask)
    sums = torch.einsum("bnhf,bnhd->bhfd", key, value.to(key.dtype))
    mass = torch.einsum("bnhf,bhf->bnh", query, key.sum(dim=1)) + eps
    mixed = torch.einsum("bnhf,bhfd->bnhd", query, sums)
    return (mixed / mass.clamp_min(FLOOR).unsqueeze(-1)).to(value.dtype)


class LinearAttention(ProjectedMixer):
    """Attention of the Linear Transformer (Katharopoulos et al., 2020), not causal.

    .. code-block:: text

        phi(x) = elu(x) + 1
        y[n,h] = phi(q[n,h]) . sum_m phi(k[m,h]) v[m,h]^T / ( phi(q[n,h]) . sum_m phi(k[m,h]) + eps )

    Queries and keys are not scaled, as there. The cost is linear in the number of tokens.

    Arguments are those of `ProjectedMixer`, without `attn_drop`, plus:

    Args:
        eps: Added to the normalizer.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`.

    Example:
        >>> import torch, tost
        >>> tost.nn.LinearAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        eps: float = 1e-6,
        **projections: Unpack[LinearProjections],
    ) -> None:
        super().__init__(embed_dim, num_heads, **projections)
        self.eps = eps

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = parts.unbind(2)
        # Sums of many positive features do not fit into half precision.
        query, key = (F.elu(part.to(statistics_dtype(part.dtype))) + 1 for part in (query, key))
        return feature_attention(query, key, value, mask, eps=self.eps)
