"""Cross-covariance attention, the mixer of XCiT.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D, temperature [H], mask [B, N].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn.mixers.projected import ProjectedMixer
from tost.ops._numerics import statistics_dtype

NORM_FLOOR = 1e-12


class CrossCovarianceAttention(ProjectedMixer):
    """XCA: attention between the features of a head, with weights taken from their covariance over the tokens.

    .. code-block:: text

        a[h]   = softmax over e of ( temperature[h] * sum_n q[n,h,d] k[n,h,e] / (|q[:,h,d]| |k[:,h,e]|) )     [D, D]
        y[n,h] = a[h] v[n,h]

    The norms run over the tokens, so the cost is linear in their number, as with TSSA.

    Arguments are those of `ProjectedMixer`.

    Example:
        >>> import torch, tost
        >>> tost.nn.CrossCovarianceAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def _add_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.temperature = nn.Parameter(torch.ones(self.num_heads, device=device, dtype=dtype))

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (part.permute(0, 2, 3, 1) for part in parts.unbind(2))  # [B, H, D, N]
        scores = _unit(query) @ _unit(key).transpose(-2, -1)
        weights = (scores * self.temperature[:, None, None]).softmax(dim=-1)
        weights = F.dropout(weights, self.attn_drop, self.training)
        return (weights.to(value.dtype) @ value).permute(0, 3, 1, 2)


def _unit(x: Tensor) -> Tensor:
    """Scale every feature of x [B, H, D, N] to norm 1 over the tokens; the floor would round to 0 in half precision."""
    return F.normalize(x.to(statistics_dtype(x.dtype)), dim=-1, eps=NORM_FLOOR).to(x.dtype)
