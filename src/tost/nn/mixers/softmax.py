"""Softmax attention, the baseline that the paper compares with.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D, mask [B, N].
"""

from __future__ import annotations

from torch import Tensor

from tost.nn.mixers.projected import ProjectedMixer


class SoftmaxAttention(ProjectedMixer):
    """Scaled dot-product attention between all pairs of tokens: ``softmax(q k^T / sqrt(D)) v`` in every head.

    Arguments are those of `ProjectedMixer`.

    Example:
        >>> import torch, tost
        >>> tost.nn.SoftmaxAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = parts.unbind(2)
        return self._attend(query, key, value, mask)
