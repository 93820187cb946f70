"""Second moments in blocks of g features: how they are stored, and how equations with them are solved.

The products ``w_i w_j`` of features in one block are packed along the last axis, each pair once: first those of every
feature with itself, D numbers, then those of features that are 1 apart, then 2, up to g - 1, always in the order of the
features. So with g = 1 the packed products are the squares, and otherwise they begin with them.

Everything is made of plain tensor operations on whole batches, g steps at most: any device, any compiler and ONNX take
it, which is not so for ``torch.linalg``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops.form import Form


def packed_width(head_dim: int, block_size: int) -> int:
    """Return how many products a head has: D(g+1)/2."""
    return head_dim * (block_size + 1) // 2


def in_blocks(x: Tensor, block_size: int) -> Tensor:
    """Return x [..., D] as ``[..., D / g, g]``."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)


def products(v: Tensor, block_size: int) -> Tensor:
    """Return the packed products of the features of v [..., D], ``[..., D(g+1)/2]``."""
    if block_size == 1:
        return v.square()
    return torch.cat([a * b for a, b in _pairs(v, v, block_size)], dim=-1)


def sum_products(u: Tensor, z: Tensor, block_size: int) -> Tensor:
    """Return the sum over tokens of products of u with z [B, N, H, D], ``[B, H, D(g+1)/2]``, one distance at a time."""
    return torch.cat([(a * b).sum(dim=1) for a, b in _pairs(u, z, block_size)], dim=-1)


def _pairs(u: Tensor, z: Tensor, block_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return for every distance the features of u [..., D] and those of z that come after them in the block."""
    a, b = in_blocks(u, block_size), in_blocks(z, block_size)
    return [(a[..., : block_size - k].flatten(-2), b[..., k:].flatten(-2)) for k in range(block_size)]


def packed(blocks: Tensor) -> Tensor:
    """Return symmetric matrices ``[..., D / g, g, g]`` as packed products, ``[..., D(g+1)/2]``."""
    g = blocks.shape[-1]
    return torch.cat([blocks.diagonal(k, dim1=-2, dim2=-1).flatten(-2) for k in range(g)], dim=-1)


def matrices(packed: Tensor, head_dim: int, block_size: int) -> Tensor:
    """Return packed products ``[..., D(g+1)/2]`` as symmetric matrices, ``[..., D / g, g, g]``."""
    return packed[..., _places(head_dim, block_size, packed.device)]


def _places(head_dim: int, block_size: int, device: torch.device) -> Tensor:
    """Return where the product of features i and j of block b is packed, int64 [D / g, g, g]."""
    blocks = head_dim // block_size
    feature = torch.arange(block_size, device=device)
    first, apart = torch.minimum(feature[:, None], feature), (feature[:, None] - feature).abs()
    before = apart * block_size - apart * (apart - 1) // 2  # pairs of a block that are less far apart
    block = torch.arange(blocks, device=device)[:, None, None]
    return blocks * before + block * (block_size - apart) + first


class Factors:
    """``I + S = L P L^T`` with unit lower triangular L and pivots P, for solving equations with it.

    What elimination leaves of S is positive semi-definite but for rounding errors. Holding its diagonal above those
    keeps solutions bounded for S of any size.

    Args:
        moments: S, symmetric positive semi-definite, ``[..., g, g]``.
        size: How large the numbers were whose rounding errors S has, ``[..., g]``; by default its own diagonal.
    """

    def __init__(self, moments: Tensor, size: Tensor | None = None) -> None:
        self._columns: list[Tensor] = []
        self._pivots: list[Tensor] = []
        g = moments.shape[-1]
        size = moments.diagonal(dim1=-2, dim2=-1) if size is None else size
        noise = g * torch.finfo(moments.dtype).eps * size
        for j in range(g):
            below, pivot = moments[..., 1:, 0], 1 + torch.maximum(moments[..., :1, 0], noise[..., j : j + 1])
            column = below / pivot
            moments = moments[..., 1:, 1:] - column.unsqueeze(-1) * below.unsqueeze(-2)
            self._columns.append(column)
            self._pivots.append(pivot)

    def solve(self, x: Tensor) -> Tensor:
        """Return ``(I + S)^{-1} x`` for vectors x [..., g], whose leading axes broadcast with those of S."""
        scaled = []
        for column, pivot in zip(self._columns, self._pivots, strict=True):
            scaled.append(x[..., :1] / pivot)
            x = x[..., 1:] - column * x[..., :1]
        solved = scaled.pop()
        for entry, column in zip(reversed(scaled), reversed(self._columns[:-1]), strict=True):
            solved = torch.cat((entry - (column * solved).sum(dim=-1, keepdim=True), solved), dim=-1)
        return solved


class Shrinkage:
    """``(I + S_b)^{-1}`` for the second moments of every head, about zero or about a mean.

    Args:
        moments: Packed second moments about zero, ``[..., D(g+1)/2]``.
        head_dim: D.
        block_size: g.
        mean: ``[..., D]``; then S is ``moments - mean mean^T``, and its diagonal is held at 0 or above.

    Attributes:
        moments: S, packed likewise.
    """

    def __init__(self, moments: Tensor, head_dim: int, block_size: int, mean: Tensor | None = None) -> None:
        self._block_size, size = block_size, None
        if mean is not None:
            size = in_blocks(moments[..., :head_dim], block_size)
            moments = moments - products(mean, block_size)
        if block_size == 1:
            moments = moments if mean is None else moments.clamp_min(0)
            self._pivots = 1 + moments
        else:
            self._factors = Factors(matrices(moments, head_dim, block_size), size)
        self.moments = moments

    def solve(self, x: Tensor) -> Tensor:
        """Return ``(I + S_b)^{-1} x_b`` for x [..., D]."""
        if self._block_size == 1:
            return x / self._pivots
        return self._factors.solve(in_blocks(x, self._block_size)).flatten(-2)


class Layout:
    """Which of its K masses, and decays, each number in the sums of a head belongs to.

    Without decays per channel there is one of them, K = 1, for all. With them each block of features has its own.

    Args:
        head_dim: D.
        form: Options of the call.
        device: Where the sums are.
    """

    def __init__(self, head_dim: int, form: Form, device: torch.device) -> None:
        self.num_masses, g = form.num_masses(head_dim), form.block_size
        self.features: Tensor | None = None
        self.squares: Tensor | None = None
        self.weighted: Tensor | None = None
        if not form.channel_decay:
            return
        blocks = torch.arange(head_dim // g, device=device)
        features = blocks.repeat_interleave(g)
        weighted = torch.cat([blocks.repeat_interleave(g - k) for k in range(g)])
        if g > 1:
            self.features = self.squares = features
            self.weighted = weighted
        if form.counted:
            self.squares = torch.cat((features, blocks))
        if form.centered:
            self.weighted = torch.cat((weighted, features))

    def spread(self, x: Tensor, places: Tensor | None) -> Tensor:
        """Return x [..., K] for each number in a sum, ``[..., F]``; as it is, if it broadcasts."""
        return x if places is None else x.index_select(-1, places)

    def collect(self, x: Tensor, places: Tensor | None) -> Tensor:
        """Return the sums of x [..., F] over what belongs to one, ``[..., K]``."""
        if self.num_masses == 1:
            return x.sum(dim=-1, keepdim=True)
        if places is None:
            return x
        return x.new_zeros(*x.shape[:-1], self.num_masses).index_add(-1, places, x)
