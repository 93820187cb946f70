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
    """

    def __init__(self, moments: Tensor) -> None:
        self._columns: list[Tensor] = []
        self._pivots: list[Tensor] = []
        g = moments.shape[-1]
        noise = g * torch.finfo(moments.dtype).eps * moments.diagonal(dim1=-2, dim2=-1)
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


def shrink(x: Tensor, moments: Tensor, block_size: int) -> Tensor:
    """Return ``(I + S_b)^{-1} x_b`` for x [..., D] and packed moments S [..., D(g+1)/2]."""
    if block_size == 1:
        return x / (1 + moments)
    factors = Factors(matrices(moments, x.shape[-1], block_size))
    return factors.solve(in_blocks(x, block_size)).flatten(-2)
