"""Multi-head subspace self-attention, the mixer of CRATE.

Shapes: x [B, N, C] (batch, tokens, width), w [B, N, H, D] with C = H * D, mask [B, N].
"""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from tost.nn.mixers.projected import ProjectedMixer, Projections


class SubspaceAttention(ProjectedMixer):
    """MSSA: softmax attention in which one projection w serves as query, key and value.

    ``y = proj_out(softmax(w w^T / sqrt(D)) w)`` in every head. It is TSSA's predecessor: the same single projection
    into subspaces, but with scores between all pairs of tokens.

    Arguments are those of `ProjectedMixer`, but `in_bias` is off by default, as in CRATE.

    Example:
        >>> import torch, tost
        >>> tost.nn.SubspaceAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    parts: ClassVar[int] = 1

    def __init__(self, embed_dim: int, num_heads: int, **projections: Unpack[Projections]) -> None:
        projections.setdefault("in_bias", False)
        super().__init__(embed_dim, num_heads, **projections)

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        w = parts.squeeze(2)
        return self._attend(w, w, w, mask)
