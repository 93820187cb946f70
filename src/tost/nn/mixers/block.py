"""The residual block of S4: a mixer without a feed-forward, and a batch norm.

Shapes: x [B, N, C] (batch, tokens, width), mask [B, N].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from tost.nn._factory import Factory
from tost.nn.packed import mix
from tost.nn.recompute import is_recomputing
from tost.ops import Packing
from tost.ops._checks import check_mask
from tost.ops._numerics import statistics_dtype, zero_padding


class TokenBatchNorm(nn.Module):
    """Batch norm over all real tokens of all sequences of a batch.

    In training, mean and variance are those of the batch; averages of both are kept for evaluation. Padding has no part
    in them. A batch counts once, also where a block is computed again in the backward pass. Where several processes
    share a batch, `share` makes it one batch; without it each process normalizes its own sequences.

    Args:
        embed_dim: Width of the tokens, C.
        eps: Added to the variance.
        momentum: Weight of a batch in the averages.
        **factory: `device` and `dtype` of the parameters.

    Example:
        >>> import torch
        >>> from tost.nn.mixers import TokenBatchNorm
        >>> TokenBatchNorm(64)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    running_mean: Tensor
    running_var: Tensor
    _sum: Callable[[Tensor], Tensor] | None = None

    def __init__(self, embed_dim: int, *, eps: float = 1e-5, momentum: float = 0.1, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.embed_dim, self.eps, self.momentum = embed_dim, eps, momentum
        self.weight = nn.Parameter(torch.ones(embed_dim, **factory))
        self.bias = nn.Parameter(torch.zeros(embed_dim, **factory))
        self.register_buffer("running_mean", torch.zeros(embed_dim, **factory))
        self.register_buffer("running_var", torch.ones(embed_dim, **factory))

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{self.embed_dim}, eps={self.eps}, momentum={self.momentum}"

    def share(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Take mean and variance over the batches of several processes.

        Args:
            sum_over_processes: Returns the sum of a tensor over the processes, with its derivative.
        """
        self._sum = sum_over_processes

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize the tokens x [B, N, C]; those that are not real, by `mask` [B, N], do not count."""
        check_mask(mask, x)
        wide = zero_padding(x, mask).to(statistics_dtype(x.dtype))
        if self.training:
            mean, variance = self._statistics(wide, mask)
        else:
            mean, variance = self.running_mean.to(wide.dtype), self.running_var.to(wide.dtype)
        scale = self.weight * (variance + self.eps).rsqrt()
        return ((wide - mean) * scale + self.bias).to(x.dtype)

    def _statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance [C] of a batch, padded with zeros, and update the averages."""
        total = self._sum or (lambda part: part)
        count = x.new_full((), x.shape[0] * x.shape[1]) if mask is None else mask.sum().to(x.dtype)
        count = total(count).clamp_min(1)
        mean = total(x.sum(dim=(0, 1))) / count
        variance = total(zero_padding(x - mean, mask).square().sum(dim=(0, 1))) / count
        if not is_recomputing():
            unbiased = variance.detach() * (count / (count - 1).clamp_min(1))
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return mean, variance


class MixerBlock(nn.Module):
    """A residual block that is nothing but its mixer.

    .. code-block:: text

        pre:   x = x + mixer(norm(x))
        post:  x = norm(x + mixer(x))

    Args:
        mixer: Mixes tokens; called as ``mixer(x, mask)``, from ``[B, N, C]`` to ``[B, N, C]``.
        embed_dim: Width of the tokens, C.
        norm: Place of the norm: ``"pre"`` or ``"post"``.
        norm_kind: ``"batch"``, see `TokenBatchNorm`, or ``"layer"``.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        ValueError: `norm` or `norm_kind` is not known.

    Example:
        >>> import torch, tost
        >>> from tost.nn.mixers import MixerBlock
        >>> MixerBlock(tost.nn.S4(64, 1, max_length=10), 64)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        mixer: nn.Module,
        embed_dim: int,
        *,
        norm: Literal["pre", "post"] = "pre",
        norm_kind: Literal["batch", "layer"] = "batch",
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post") or norm_kind not in ("batch", "layer"):
            raise ValueError(f"norm={norm!r} takes 'pre' or 'post', norm_kind={norm_kind!r} takes 'batch' or 'layer'.")
        self.norm, self.attention = norm, mixer
        kind: type[TokenBatchNorm | nn.LayerNorm] = TokenBatchNorm if norm_kind == "batch" else nn.LayerNorm
        self.norm1 = kind(embed_dim, **factory)

    def extra_repr(self) -> str:
        """Show the layout in ``print(module)``."""
        return f"norm={self.norm!r}"

    def forward(self, x: Tensor, mask: Tensor | None = None, *, packing: Packing | None = None) -> Tensor:
        """Transform the tokens x [B, N, C], with `mask` [B, N] of the real ones; returns [B, N, C]."""
        if self.norm == "post":
            return self._normed(x + mix(self.attention, x, mask, packing), mask)
        return x + mix(self.attention, self._normed(x, mask), mask, packing)

    def _normed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.norm1(x) if isinstance(self.norm1, nn.LayerNorm) else self.norm1(x, mask)
