"""The feed-forward branch of a block.

Shapes: x [B, N, C] (batch, tokens, width), hidden [B, N, M].
"""

from __future__ import annotations

from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tost.nn._factory import Factory
from tost.ops._transforms import is_transformed


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to every token alone.

    The GELU is computed again in the backward pass. It is cheap, and what it returns would be a quarter of all that a
    block keeps.

    Args:
        embed_dim: Width of the tokens, C.
        hidden_dim: Width between the two layers, M.
        bias: Biases of both layers.
        drop: Dropout on the output.
        activation: ``"gelu"``, the exact one, or ``"gelu_tanh"``, the approximation that GPT-2 was trained with.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        ValueError: `activation` is neither of the two.

    Example:
        >>> import torch, tost
        >>> tost.nn.MLP(64, 256)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        bias: bool = True,
        drop: float = 0.0,
        activation: Literal["gelu", "gelu_tanh"] = "gelu",
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if activation not in ("gelu", "gelu_tanh"):
            raise ValueError(f"activation={activation!r} is not known; it takes 'gelu' or 'gelu_tanh'.")
        self.proj_in = nn.Linear(embed_dim, hidden_dim, bias=bias, **factory)
        self.proj_out = nn.Linear(hidden_dim, embed_dim, bias=bias, **factory)
        self.drop, self.activation = drop, activation

    def forward(self, x: Tensor) -> Tensor:
        """Transform the tokens x [B, N, C]; returns [B, N, C]."""
        hidden: Tensor = self.proj_in(x)
        # A compiler decides by itself what to keep, and transforms of torch.func refuse to compute again.
        recorded = torch.is_grad_enabled() and hidden.requires_grad
        if recorded and not torch.compiler.is_compiling() and not is_transformed():
            y: Tensor = checkpoint(self._finish, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self._finish(hidden)
        return F.dropout(y, self.drop) if self.training and self.drop > 0 else y

    def _finish(self, hidden: Tensor) -> Tensor:
        return self.proj_out(F.gelu(hidden, approximate="none" if self.activation == "gelu" else "tanh"))
