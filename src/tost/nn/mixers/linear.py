"""Attention whose weights are products of features: Linear Transformer and Performer.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D, features [B, N, H, F], directions [F, D],
mask [B, N].
"""

from __future__ import annotations

import math
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from tost.nn.mixers.base import LinearProjections, ProjectedMixer
from tost.ops._numerics import statistics_dtype, zero_padding

FLOOR = 1e-30
"""Smallest normalizer. Only a sequence of padding alone comes near it."""


def feature_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, eps: float = 0.0) -> Tensor:
    """Attend with weights that are products of features, without ever forming them.

    .. code-block:: text

        y[n,h] = sum_m (q[n,h] . k[m,h]) v[m,h] / ( sum_m q[n,h] . k[m,h] + eps )

    The sums over m are taken first, so time and memory are linear in the number of tokens.

    Args:
        query: Features of the queries, none of them negative, ``[B, N, H, F]``.
        key: Features of the keys, none of them negative, ``[B, N, H, F]``.
        value: ``[B, N, H, D]``, of any floating point dtype.
        mask: Real tokens, bool ``[B, N]``; the others do not count.
        eps: Added to the normalizer.

    Returns:
        ``[B, N, H, D]``, of the dtype of `value`.
    """
    key = zero_padding(key, mask)
    sums = torch.einsum("bnhf,bnhd->bhfd", key, value.to(key.dtype))
    mass = torch.einsum("bnhf,bhf->bnh", query, key.sum(dim=1)) + eps
    mixed = torch.einsum("bnhf,bhfd->bnhd", query, sums)
    return (mixed / mass.clamp_min(FLOOR).unsqueeze(-1)).to(value.dtype)


class LinearAttention(ProjectedMixer):
    """Attention of the Linear Transformer (Katharopoulos et al., 2020), not causal.

    .. code-block:: text

        phi(x) = elu(x) + 1
        y[n,h] = phi(q[n,h]) . sum_m phi(k[m,h]) v[m,h]^T / ( phi(q[n,h]) . sum_m phi(k[m,h]) + eps )

    Queries and keys are not scaled, as there. The cost is linear in the number of tokens.

    Arguments are those of `ProjectedMixer`, without `attn_drop`, plus:

    Args:
        eps: Added to the normalizer.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`.

    Example:
        >>> import torch, tost
        >>> tost.nn.LinearAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        eps: float = 1e-6,
        **projections: Unpack[LinearProjections],
    ) -> None:
        super().__init__(embed_dim, num_heads, **projections)
        self.eps = eps

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = parts.unbind(2)
        # Sums of many positive features do not fit into half precision.
        query, key = (F.elu(part.to(statistics_dtype(part.dtype))) + 1 for part in (query, key))
        return feature_attention(query, key, value, mask, eps=self.eps)


RELU_FLOOR = 1e-3


def orthogonal_directions(
    num_features: int,
    head_dim: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw directions that are each distributed like a Gaussian vector, and orthogonal to each other in blocks of D.

    Args:
        num_features: F.
        head_dim: D.
        device: Where to draw.
        dtype: Type of the result; torch's default if None.
        generator: Source of random numbers; torch's own if None.

    Returns:
        ``[F, D]``.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, r = torch.linalg.qr(normal(-(-num_features // head_dim), head_dim, head_dim))
    # The factor of a Gaussian matrix is uniform among rotations only if the diagonal of the other one is positive.
    rows: Tensor = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.reshape(-1, head_dim)[:num_features]
    lengths: Tensor = torch.linalg.vector_norm(normal(num_features, head_dim), dim=1, keepdim=True)
    return lengths * rows


def positive_features(x: Tensor, directions: Tensor, shift: Tensor | float = 0.0, *, eps: float = 0.0) -> Tensor:
    """Return features whose products estimate ``exp(x . y)`` without bias, over the draw of the directions.

    .. code-block:: text

        phi(x)[f] = ( exp( directions[f] . x - |x|^2 / 2 - shift ) + eps ) / sqrt(F)

    Args:
        x: ``[..., D]``.
        directions: ``[F, D]``; see `orthogonal_directions`.
        shift: Keeps the exponentials in range; it cancels when the weights are divided by their sum.
        eps: Added to every feature, so that none vanishes.

    Returns:
        ``[..., F]``.
    """
    return _features(_exponents(x, directions) - shift, eps)


def _exponents(x: Tensor, directions: Tensor) -> Tensor:
    return x @ directions.mT - x.square().sum(dim=-1, keepdim=True) / 2


def _features(exponents: Tensor, eps: float) -> Tensor:
    return (exponents.exp() + eps) / math.sqrt(exponents.shape[-1])


class Performer(ProjectedMixer):
    """FAVOR+ attention of the Performer (Choromanski et al., 2021), not causal.

    Softmax attention has weights ``exp(q . k / sqrt(D))``; here they are estimated by products of F positive random
    features, see `positive_features`, and the sums over the tokens are taken first. The cost is linear in their
    number. With ``kernel="relu"`` the features are ``relu(x) + 0.001``, without directions and scaling: the official
    Long-Range Arena has that everywhere but on ListOps, where it takes the softmax kernel with 2 features.

    The directions are a buffer: they are drawn when the module is made, by torch's random numbers, and saved with the
    weights. `redraw` draws them again in each forward pass in training; any other rhythm is had by calling
    `redraw_directions`.

    Arguments are those of `ProjectedMixer`, without `attn_drop`, plus:

    Args:
        num_features: F; None takes ``D ln D`` of the paper's theory, rounded down. Not used by ``kernel="relu"``.
        kernel: ``"softmax"`` or ``"relu"``.
        redraw: Take new directions in each forward pass in training.
        eps: Added to every feature of the softmax kernel.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, `num_features` is not positive, or `kernel` is unknown.

    Example:
        >>> import torch, tost
        >>> tost.nn.Performer(64, 4, num_features=32)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    directions: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_features: int | None = None,
        kernel: Literal["softmax", "relu"] = "softmax",
        redraw: bool = False,
        eps: float = 1e-6,
        **projections: Unpack[LinearProjections],
    ) -> None:
        super().__init__(embed_dim, num_heads, **projections)
        if kernel not in ("softmax", "relu"):
            raise ValueError(f"kernel={kernel!r} is not known; it takes 'softmax' or 'relu'.")
        if num_features is not None and num_features < 1:
            raise ValueError(f"num_features={num_features} is not possible; use a positive number, or None.")
        self.num_features = num_features or max(1, int(self.head_dim * math.log(self.head_dim)))
        self.kernel, self.redraw, self.eps = kernel, redraw, eps
        drawn = self.proj_in.weight.new_empty(self.num_features, self.head_dim) if kernel == "softmax" else None
        self.register_buffer("directions", drawn)
        self.redraw_directions()

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{super().extra_repr()}, num_features={self.num_features}, kernel={self.kernel!r}"

    @torch.no_grad()
    def redraw_directions(self, generator: torch.Generator | None = None) -> None:
        """Take new directions.

        Args:
            generator: Source of random numbers; torch's own if None.
        """
        if self.directions is not None:
            # Orthogonal in single precision at least: half precision has no such decomposition.
            dtype, device = statistics_dtype(self.directions.dtype), self.directions.device
            drawn = orthogonal_directions(
                self.num_features, self.head_dim, device=device, dtype=dtype, generator=generator
            )
            self.directions.copy_(drawn)

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        if self.training and self.redraw:
            self.redraw_directions()
        query, key, value = parts.unbind(2)
        query, key = (part.to(statistics_dtype(part.dtype)) for part in (query, key))
        if self.directions is None:
            query, key = F.relu(query) + RELU_FLOOR, F.relu(key) + RELU_FLOOR
        elif parts.shape[1] > 0:
            query, key = self._positive(query, key, mask)
        return feature_attention(query, key, value, mask)

    def _positive(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the features of queries and keys [B, N, H, D], with exponentials of at most 1."""
        assert self.directions is not None
        # A copy: the buffer may be drawn again before the backward pass needs it.
        directions = self.directions.to(query.dtype, copy=self.redraw)
        query, key = (_exponents(part * self.head_dim**-0.25, directions) for part in (query, key))
        # Shifts cancel in the quotient, and so do their gradients.
        per_query = query.detach().amax(dim=-1, keepdim=True)
        real = key.detach()
        if mask is not None:
            real = real.masked_fill(~(mask | ~mask.any(dim=1, keepdim=True))[:, :, None, None], -math.inf)
        per_head = real.amax(dim=(1, 3), keepdim=True)
        return _features(query - per_query, self.eps), _features((key - per_head).clamp_max(0), self.eps)
