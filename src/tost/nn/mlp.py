"""The feed-forward branch of a block: an MLP, or the sparse coding step of CRATE.

Shapes: x [B, N, C] (batch, tokens, width), hidden [B, N, M], dictionary [C, C].
"""

from __future__ import annotations

from typing import ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tost.nn._checks import Factory
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
