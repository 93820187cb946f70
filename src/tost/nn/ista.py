"""The feed-forward of CRATE: one step of a sparse coding algorithm.

Shapes: x [B, N, C] (batch, tokens, width), dictionary [C, C].
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn._factory import Factory


class ISTA(nn.Module):
    """One step of the iterative shrinkage-thresholding algorithm towards a non-negative sparse code of each token.

    .. code-block:: text

        y = relu( x + eta D^T (x - D x) - eta lambda )

    This is a proximal gradient step, from the guess ``a = x``, on ``|x - D a|^2 / 2 + lambda |a|_1`` over ``a >= 0``.
    The token is replaced by its code: a `Block` adds no residual connection around this module.

    Args:
        embed_dim: Width of the tokens, C.
        step_size: eta.
        threshold: lambda, the price of a non-zero entry.
        **factory: `device` and `dtype` of the parameters.

    Attributes:
        residual: False; read by `Block`.

    Example:
        >>> import torch, tost
        >>> tost.nn.ISTA(64)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    residual: ClassVar[bool] = False

    def __init__(
        self,
        embed_dim: int,
        *,
        step_size: float = 0.1,
        threshold: float = 0.1,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.step_size, self.threshold = step_size, threshold
        self.dictionary = nn.Parameter(torch.empty(embed_dim, embed_dim, **factory))
        nn.init.kaiming_uniform_(self.dictionary)

    def extra_repr(self) -> str:
        """Show the settings in ``print(module)``."""
        return f"embed_dim={self.dictionary.shape[0]}, step_size={self.step_size}, threshold={self.threshold}"

    def forward(self, x: Tensor) -> Tensor:
        """Take the step for the tokens x [B, N, C]; returns their codes, [B, N, C], none below 0."""
        # D^T x - D^T D x in two products instead of three.
        pull = F.linear(x - F.linear(x, self.dictionary), self.dictionary.t())
        return F.relu(torch.add(x - self.step_size * self.threshold, pull, alpha=self.step_size))
