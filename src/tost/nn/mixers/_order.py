"""Padding for mixers to which the place of a token matters: the real tokens are moved together first.

Shapes: x [B, N, ...] (batch, tokens), mask [B, N].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tost.ops._transforms import has_values


def real_first(mix: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``mix(x, mask)`` as if all padding came after the real tokens, with every result at its token's place.

    A mixer that numbers, cuts or convolves its tokens then treats padding anywhere like padding at the end.

    Args:
        mix: From ``[B, N, ...]`` and a mask to ``[B, N, ...]``.
        x: Tokens, ``[B, N, ...]``.
        mask: Real tokens, bool ``[B, N]``.
    """
    if mask is None or _is_behind(mask):
        return mix(x, mask)
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return _take(mix(_take(x, order), mask.gather(1, order)), order.argsort(dim=1))


def _is_behind(mask: Tensor) -> bool:
    """Return whether all padding is at the end, as is usual; False if the data cannot be looked at."""
    return has_values(mask) and not bool((mask[:, 1:] > mask[:, :-1]).any())


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Return the tokens of x [B, N, ...] in the order [B, N]."""
    return x.gather(1, order.reshape(*order.shape, *(1,) * (x.dim() - 2)).expand_as(x))
