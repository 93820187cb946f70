"""Padding for mixers to which the place of a token matters: the real tokens are moved together first.

Shapes: x [B, N, ...] (batch, tokens), mask [B, N].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tost.nn._checks import check_width, refuse_context
from tost.ops._checks import check_mask
from tost.ops._numerics import zero_padding
from tost.ops._transforms import has_values


class OrderedMixer(nn.Module):
    """Mixes tokens by their places in a whole sequence; subclasses supply how. A mask is a deletion."""

    embed_dim: int

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix each of the tokens x [B, N, C] with others.

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``, padding anywhere.

        Returns:
            ``[B, N, C]``; 0 for padding.

        Raises:
            ValueError: `x` or `mask` has the wrong shape.
            BackendError: Context parallelism is active; this needs whole sequences.
        """
        refuse_context(type(self).__name__)
        check_width(x, self.embed_dim)
        check_mask(mask, x)
        return zero_padding(real_first(self._run, zero_padding(x, mask), mask), mask)

    @abstractmethod
    def _run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Mix tokens of which the real ones come first, and zeros follow."""


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


def real_last(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the tokens x [B, N, ...] with all padding in front of the real ones."""
    return x if mask is None else _take(x, mask.to(torch.uint8).argsort(dim=1, stable=True))


def _is_behind(mask: Tensor) -> bool:
    """Return whether all padding is at the end, as is usual; False if the data cannot be looked at."""
    return has_values(mask) and not bool((mask[:, 1:] > mask[:, :-1]).any())


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Return the tokens of x [B, N, ...] in the order [B, N]."""
    return x.gather(1, order.reshape(*order.shape, *(1,) * (x.dim() - 2)).expand_as(x))
