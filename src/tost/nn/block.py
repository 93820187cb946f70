"""Residual blocks: a token mixer and an MLP, each with a norm, a residual connection and perhaps a layer scale.

Shapes: x [B, N, C] (batch, tokens, width), mask [B, N].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tost.nn.attention import CausalTSSAttention
from tost.ops import TSSAState

__all__ = ["Block", "CausalBlock", "run_blocks"]


class Block(nn.Module):
    """A residual block around any token mixer.

    .. code-block:: text

        pre:   x = x + gamma1 * attention(norm1(x)),  x = x + gamma2 * mlp(norm2(x))
        post:  x = norm1(x + gamma1 * attention(x)),  x = norm2(x + gamma2 * mlp(x))

    Args:
        attention: Mixes tokens; called as ``attention(x, mask)``, from ``[B, N, C]`` to ``[B, N, C]``.
        mlp: Transforms each token alone; called as ``mlp(x)``.
        embed_dim: Width of the tokens, C.
        norm: Where the LayerNorms stand: ``"pre"``, in front of the branches, or ``"post"``, behind the sums.
        norm_bias: Biases of the LayerNorms.
        layer_scale: Initial value of the learned vectors gamma1 and gamma2; None has none.
        device: Where the parameters live.
        dtype: Type of the parameters.

    Raises:
        ValueError: `norm` is neither of the two.

    Example:
        >>> import torch, tost
        >>> block = tost.nn.Block(tost.TSSAttention(64, 4), tost.nn.MLP(64, 256), 64)
        >>> block(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    gamma1: nn.Parameter | None
    gamma2: nn.Parameter | None

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        embed_dim: int,
        *,
        norm: Literal["pre", "post"] = "pre",
        norm_bias: bool = True,
        layer_scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm={norm!r} is not known; it takes 'pre' or 'post'.")
        self.norm = norm
        self.norm1 = nn.LayerNorm(embed_dim, bias=norm_bias, device=device, dtype=dtype)
        self.attention = attention
        self.norm2 = nn.LayerNorm(embed_dim, bias=norm_bias, device=device, dtype=dtype)
        self.mlp = mlp
        for name in ("gamma1", "gamma2"):
            gamma = None if layer_scale is None else torch.full((embed_dim,), layer_scale, device=device, dtype=dtype)
            self.register_parameter(name, None if gamma is None else nn.Parameter(gamma))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Transform the tokens x [B, N, C].

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``.

        Returns:
            ``[B, N, C]``. What comes out for padding means nothing and reaches no other token.
        """
        return self._finish(x, self.attention(self._start(x), mask))

    def extra_repr(self) -> str:
        """Show the layout in ``print(module)``."""
        return f"norm={self.norm!r}, layer_scale={self.gamma1 is not None}"

    def _start(self, x: Tensor) -> Tensor:
        """Return what the attention sees of x."""
        return self.norm1(x) if self.norm == "pre" else x

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Do everything that follows the attention."""
        x = self._add(x, mixed, self.gamma1, self.norm1)
        fed = self.mlp(self.norm2(x) if self.norm == "pre" else x)
        return self._add(x, fed, self.gamma2, self.norm2)

    def _add(self, x: Tensor, branch: Tensor, gamma: Tensor | None, norm: nn.Module) -> Tensor:
        x = x + (branch if gamma is None else gamma * branch)
        return x if self.norm == "pre" else norm(x)


class CausalBlock(Block):
    """A `Block` with causal TSSA, which can continue a sequence from a state.

    Args:
        attention: The causal attention.
        mlp: As in `Block`.
        embed_dim: As in `Block`.
        norm: As in `Block`.
        norm_bias: As in `Block`.
        layer_scale: As in `Block`.
        device: As in `Block`.
        dtype: As in `Block`.

    Raises:
        ValueError: As in `Block`.

    Example:
        >>> import torch, tost
        >>> block = tost.nn.CausalBlock(tost.CausalTSSAttention(64, 4, 128), tost.nn.MLP(64, 256), 64)
        >>> first, state = block.forward_with_state(torch.randn(1, 100, 64))
        >>> second, state = block.forward_with_state(torch.randn(1, 1, 64), state)
        >>> second.shape, state.position.tolist()
        (torch.Size([1, 1, 64]), [101])
    """

    attention: CausalTSSAttention

    def forward_with_state(
        self, x: Tensor, state: TSSAState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, TSSAState]:
        """Continue sequences of which `state` has seen the beginning.

        Args:
            x: The next tokens, ``[B, N, C]``.
            state: The state returned with the tokens before; None at the start.
            mask: Real tokens, bool ``[B, N]``.

        Returns:
            ``[B, N, C]`` and the state after these tokens.
        """
        mixed, after = self.attention.forward_with_state(self._start(x), state, mask)
        return self._finish(x, mixed), after


def run_blocks(
    blocks: Iterable[nn.Module], x: Tensor, mask: Tensor | None = None, *, recompute: bool = False
) -> Tensor:
    """Apply blocks one after the other.

    Args:
        blocks: Modules called as ``block(x, mask)``.
        x: Tokens, ``[B, N, C]``.
        mask: Real tokens, bool ``[B, N]``.
        recompute: Keep only the input of each block for the backward pass and compute the rest again (gradient
            checkpointing): less memory, a third more work, the same gradients.

    Returns:
        ``[B, N, C]``.
    """
    for block in blocks:
        x = checkpoint(block, x, mask, use_reentrant=False) if recompute and torch.is_grad_enabled() else block(x, mask)
    return x
