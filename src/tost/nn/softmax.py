"""Softmax attention, the baseline that the paper compares with.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D, mask [B, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.nn._mixer import ProjectedMixer

__all__ = ["SoftmaxAttention"]


class SoftmaxAttention(ProjectedMixer):
    """Scaled dot-product attention between all pairs of tokens: ``softmax(q k^T / sqrt(D)) v`` in every head.

    Args:
        embed_dim: Width of the tokens, C.
        num_heads: Number of heads, H; divides C.
        in_bias: Bias of the projection to queries, keys and values.
        out_bias: Bias of the output projection.
        attn_drop: Dropout on the attention weights.
        out_drop: Dropout on the output.
        device: Where the parameters live.
        dtype: Type of the parameters.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`.

    Example:
        >>> import torch, tost
        >>> tost.nn.SoftmaxAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        in_bias: bool = True,
        out_bias: bool = True,
        attn_drop: float = 0.0,
        out_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, in_bias, out_bias, attn_drop, out_drop, device, dtype)

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = parts.unbind(2)
        return self._attend(query, key, value, mask)
