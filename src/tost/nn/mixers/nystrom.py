"""Nystrom attention: the softmax matrix from its columns and rows at a few landmarks.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, H, N, D] with C = H * D, landmarks [B, H, M, D], mask [B, N].
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn.mixers._order import real_first
from tost.nn.mixers.projected import ProjectedMixer, Projections
from tost.ops._numerics import statistics_dtype


def iterative_pinv(matrix: Tensor, iterations: int = 6) -> Tensor:
    """Approximate pseudo-inverses by an iteration of third order, products only.

    .. code-block:: text

        Z[0]   = A^T / ( |A|_1 |A|_inf )
        Z[i+1] = 1/4 Z[i] ( 13 I - A Z[i] ( 15 I - A Z[i] ( 7 I - A Z[i] ) ) )

    Args:
        matrix: A, ``[..., M, M]``.
        iterations: How many steps.

    Returns:
        ``[..., M, M]``.
    """
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    size = matrix.abs().sum(dim=-2).amax(dim=-1) * matrix.abs().sum(dim=-1).amax(dim=-1)
    z = matrix.mT / size.clamp_min(torch.finfo(matrix.dtype).tiny)[..., None, None]
    for _ in range(iterations):
        product = matrix @ z
        z = z @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product))) / 4
    return z


class NystromAttention(ProjectedMixer):
    """Attention of Nystromformer (Xiong et al., 2021).

    .. code-block:: text

        q', k'  = means of queries and keys over M segments of the sequence
        y       = softmax(q k'^T / sqrt(D))  pinv( softmax(q' k'^T / sqrt(D)) )  softmax(q' k^T / sqrt(D))  v

    plus a convolution of the values over their neighbours, with one kernel per head. The cost is linear in the number
    of tokens. Sequences of at most M tokens get softmax attention itself, as in the authors' code. Segments differ in
    length by at most one token, so no length is refused; lengths that M divides are cut as there.

    Padding never counts, and segments are cut from the real tokens alone. So a mask is a deletion, except where it
    leaves at most M of more than M tokens: each of them is then a landmark, and what is exact without the padding is
    as good as the iteration with it.

    Arguments are those of `ProjectedMixer`, plus:

    Args:
        num_landmarks: M.
        conv_width: Width of the convolution in tokens, odd; 0 has none. The authors take 33, and 35 in the Long-Range
            Arena.
        iterations: Steps of the pseudo-inverse; see `iterative_pinv`.
        attn_drop: Dropout on the attention weights between tokens and landmarks.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or another argument is out of its range.

    Example:
        >>> import torch, tost
        >>> tost.nn.NystromAttention(64, 4, num_landmarks=8)(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    conv: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_landmarks: int = 64,
        conv_width: int = 33,
        iterations: int = 6,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(embed_dim, num_heads, **projections)
        if num_landmarks < 1 or iterations < 1:
            raise ValueError(f"num_landmarks={num_landmarks} and iterations={iterations} must both be at least 1.")
        if conv_width < 0 or (conv_width > 0 and conv_width % 2 == 0):
            raise ValueError(f"conv_width={conv_width} has no centre; use an odd number such as 33, or 0 for none.")
        self.num_landmarks, self.conv_width, self.iterations = num_landmarks, conv_width, iterations
        kernel = self.proj_in.weight.new_empty(num_heads, 1, conv_width) if conv_width else None
        self.register_parameter("conv", None if kernel is None else nn.Parameter(kernel))
        if self.conv is not None:
            nn.init.kaiming_uniform_(self.conv, a=math.sqrt(5))

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{super().extra_repr()}, num_landmarks={self.num_landmarks}, conv_width={self.conv_width}"

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        return real_first(self._approximate, parts, mask) if parts.shape[1] > 0 else parts[:, :, 0]

    def _approximate(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        if parts.shape[1] <= self.num_landmarks:
            query, key, value = parts.unbind(2)
            mixed = self._attend(query, key, value, mask)
        else:
            mixed = self._through_landmarks(parts, mask).transpose(1, 2).to(parts.dtype)
        return mixed if self.conv is None else mixed + self._near(parts[:, :, 2])

    def _through_landmarks(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        parts = parts.to(statistics_dtype(parts.dtype))
        sums, sizes = self._segments(parts[:, :, :2] * self.head_dim**-0.25, mask)
        landmarks = (sums / sizes[..., None, None, None].clamp_min(1)).permute(2, 0, 3, 1, 4)  # q', k': [B, H, M, D]
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        query, key = query * self.head_dim**-0.25, key * self.head_dim**-0.25
        # A sequence of few tokens leaves segments empty. They are shut out by rows and columns of zeros.
        empty = (sizes == 0)[:, None, :, None]
        hidden = empty.mT & ~empty.all(dim=2, keepdim=True)
        rows = _weights(query @ landmarks[1].mT, hidden)
        middle = _weights(landmarks[0] @ landmarks[1].mT, hidden).masked_fill(empty, 0)
        padding = None if mask is None else (~mask & mask.any(dim=1, keepdim=True))[:, None, None, :]
        columns = _weights(landmarks[0] @ key.mT, padding)
        rows, columns = (F.dropout(part, self.attn_drop, self.training) for part in (rows, columns))
        return rows @ (iterative_pinv(middle, self.iterations) @ (columns @ value))

    def _segments(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sums of x [B, N, ...] over M equal shares of the real tokens, which come first, and their sizes."""
        B, N, M = x.shape[0], x.shape[1], self.num_landmarks
        if mask is None and N % M == 0:
            return torch.unflatten(x, 1, (M, -1)).sum(dim=2), x.new_full((1, M), N // M)
        at = torch.arange(N, device=x.device)
        if mask is None:
            segment = (at * M // N).expand(B, -1)
        else:
            segment = (at * M // mask.sum(dim=1, keepdim=True).clamp_min(1)).where(mask, M)  # one more, for padding
        flat = x.flatten(2)
        sums = flat.new_zeros(B, M + 1, flat.shape[2]).scatter_add(1, segment.unsqueeze(-1).expand_as(flat), flat)
        sizes = flat.new_zeros(B, M + 1).scatter_add(1, segment, torch.ones_like(flat[..., 0]))
        return torch.unflatten(sums[:, :M], 2, x.shape[2:]), sizes[:, :M]

    def _near(self, value: Tensor) -> Tensor:
        """Convolve values [B, N, H, D] over the tokens, every feature of a head with the same kernel."""
        assert self.conv is not None
        rows = value.permute(0, 3, 2, 1).flatten(0, 1)  # [B * D, H, N]
        near = F.conv1d(rows, self.conv.to(rows.dtype), padding=self.conv_width // 2, groups=self.num_heads)
        return torch.unflatten(near, 0, (value.shape[0], -1)).permute(0, 3, 2, 1)


def _weights(scores: Tensor, hidden: Tensor | None) -> Tensor:
    return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(dim=-1)
