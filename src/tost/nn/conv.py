"""Depth-wise convolutions over the tokens of a text or over the grid of an image; extensions to the paper's models.

Shapes: x [B, N, C] (batch, tokens, width), mask [B, N], weight [C, K] with K taps, window [B, K - 1, C]. On a grid,
N = rows * columns in row-major order.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost import parallel
from tost.nn._checks import Factory, check_width, refuse_context
from tost.nn.mixers.base import Accepts, OrderedMixer, accepted
from tost.nn.state import Carry, ContinuesPacked
from tost.ops import Packing
from tost.ops._checks import check_mask
from tost.ops._numerics import num_tokens, statistics_dtype, zero_padding
from tost.ops._transforms import gradients, is_transformed, wants_graph
from tost.parallel.context import require_shared
from tost.parallel.window import last_tokens

# Below this many tokens a convolution costs more to set up than to compute.
_FEW = 8
# How much of a random kernel there is at first in one that starts with the token before.
_NOISE = 0.3
# Numbers in a chunk of the sum over tokens: a few of these stay in a cache.
_CHUNK_NUMEL = 1 << 17


class CausalConvolution(nn.Module, ContinuesPacked[Tensor]):
    """Mixes each token with the few before it, feature by feature, from a state of constant size.

    Statistics of a prefix cannot tell the last tokens from the first; this can. A `CausalBlock` adds the result to what
    a branch sees, so the identity is not part of the kernel, and there is no bias, which the projection after it may
    have. Only real tokens are neighbours of each other; before the first there is zero. By default the kernel starts as
    N(0, 1 / sqrt(K)), a mixture of the neighbours as large as the token: each feature looks elsewhere from the first
    step on. Language models that started with small kernels learned more slowly. With ``start="previous"`` it starts as
    that times 0.3, plus the token before. A token then looks the same to what follows the convolution whether it is the
    token itself or the one before, so that one projection, as TSSA has it, recognizes a pair of tokens by its first.

    The state that `forward_with_state` takes and returns is the window of the last tokens, ``[B, K - 1, C]``.

    Args:
        embed_dim: Width of the tokens, C.
        width: Number of taps, K: the token itself and the K - 1 before it; at least 2.
        start: Initial kernel: ``"random"``, or ``"previous"``.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        ValueError: `width` reaches no other token, or `start` is neither of the two.

    Example:
        >>> import torch, tost
        >>> conv = tost.nn.CausalConvolution(64, width=4)
        >>> first, window = conv.forward_with_state(torch.randn(1, 100, 64))
        >>> second, window = conv.forward_with_state(torch.randn(1, 1, 64), window)
        >>> second.shape, window.shape
        (torch.Size([1, 1, 64]), torch.Size([1, 3, 64]))
    """

    accepts = Accepts(packing=True, shared=True, state=Tensor)

    def __init__(
        self,
        embed_dim: int,
        *,
        width: int = 4,
        start: Literal["random", "previous"] = "random",
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if width < 2:
            raise ValueError(f"width={width} reaches no other token; use at least 2, such as 4.")
        if start not in ("random", "previous"):
            raise ValueError(f"start={start!r} is not known; it takes 'random' or 'previous'.")
        self.embed_dim, self.width = embed_dim, width
        self.weight = nn.Parameter(torch.empty(embed_dim, width, **factory))
        nn.init.normal_(self.weight, std=width**-0.5)
        if start == "previous":
            with torch.no_grad():
                self.weight.mul_(_NOISE)[:, -2].add_(1)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"embed_dim={self.embed_dim}, width={self.width}"

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, packing: Packing | None = None, carry: Carry | None = None
    ) -> Tensor:
        """Mix the tokens x [B, N, C], each with those just before it.

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``, padding anywhere.
            packing: Where the sequences begin, if several are packed into a row; windows then have S entries.
            carry: A window to continue from, which is replaced by the one after these tokens; see `forward_with_state`.

        Returns:
            ``[B, N, C]``; 0 for padding.

        Raises:
            ValueError: `x`, `mask` or the window has the wrong shape.
        """
        check_width(x, self.embed_dim)
        check_mask(mask, x)
        sequences = x.shape[0] if packing is None else packing.num_sequences
        before = self._window(x, sequences, None if carry is None else carry.state)
        if parallel.active() is not None:
            require_shared(packing)
        y, after = self._masked(x, before, mask) if packing is None else self._packed(x, before, mask, packing)
        if carry is not None:
            carry.state = after
        return y

    def _masked(self, x: Tensor, before: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve tokens among which may be padding."""
        if mask is None:
            return self._run(x, before, None)
        # Real tokens come first and in order: then neighbours are neighbours, whatever lies between them.
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True).unsqueeze(-1)
        packed = zero_padding(x, mask).gather(1, order.expand_as(x))
        y, after = self._run(packed, before, mask)
        place = (mask.cumsum(dim=1) - 1).clamp_min(0).unsqueeze(-1)
        return zero_padding(y.gather(1, place.expand_as(y)), mask), after

    def _packed(self, x: Tensor, before: Tensor, mask: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        """Convolve packed sequences, among which may be padding."""
        if mask is not None:
            real, shorter = packing.without_padding(mask)
            near, after = self._packed(x.flatten(0, 1).index_select(0, real).unsqueeze(0), before, None, shorter)
            y = x.new_zeros(x.shape).flatten(0, 1).index_copy(0, real, near.squeeze(0))
            return y.reshape(x.shape), after
        if packing.num_sequences == 0:
            return torch.zeros_like(x), before
        last: Tensor | None = None
        if (context := parallel.active()) is not None:
            own = _last_packed(*packing.prepend(x, torch.zeros_like(before)), before.shape)
            before, last = last_tokens(own, packing.num_tokens(), before, context=context)
        # Each sequence after its window: what the convolution finds where one ends and the next begins is not used.
        seen, longer = packing.prepend(x, before)
        place = torch.arange(len(packing.sequence), device=x.device) + packing.sequence * (self.width - 1)
        y = _correlated(seen, self.weight).squeeze(0).index_select(0, place).reshape(x.shape)
        return y, _last_packed(seen, longer, before.shape) if last is None else last

    def _run(self, x: Tensor, before: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve tokens of which the real ones come first."""
        after = None
        if (context := parallel.active()) is not None:
            own = _last(torch.cat((torch.zeros_like(before), x), dim=1), self.width - 1, mask)
            before, after = last_tokens(own, num_tokens(x, mask), before, context=context)
        seen = torch.cat((before, x), dim=1)
        return _correlated(seen, self.weight), _last(seen, self.width - 1, mask) if after is None else after

    def _window(self, x: Tensor, sequences: int, window: Tensor | None) -> Tensor:
        shape = (sequences, self.width - 1, self.embed_dim)
        if window is None:
            return x.new_zeros(shape)
        if window.shape != shape:
            raise ValueError(
                f"the window of the convolution has shape {tuple(window.shape)}, but x with shape {tuple(x.shape)} "
                f"needs {shape}. Pass the state that came from the same batch and model, or None at the start."
            )
        return window.to(x.dtype)


class _Centred(nn.Module):
    """A kernel for each feature, with the token itself in its middle. It starts small, N(0, 0.02)."""

    def __init__(self, embed_dim: int, *, width: int = 3, **factory: Unpack[Factory]) -> None:
        super().__init__()
        if width < 1 or width % 2 == 0:
            raise ValueError(f"width={width} has no centre; use an odd number of at least 1, such as 3.")
        self.embed_dim, self.width = embed_dim, width
        taps = (1, width, width) if accepted(self).grid else (width,)
        self.weight = nn.Parameter(torch.empty(embed_dim, *taps, **factory))
        nn.init.normal_(self.weight, std=0.02)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"embed_dim={self.embed_dim}, width={self.width}"


class GridConvolution(_Centred):
    """A depth-wise convolution over the neighbours of each token on the grid, zero beyond its edge.

    Statistics over all tokens cannot tell neighbours from strangers; this can. A `Block` adds the result to what its
    branches see or to the tokens themselves, so the identity is not part of the kernel: it starts small, N(0, 0.02),
    and without a bias, which the norms and projections around it already have. The kernel fits every grid, whatever its
    size and aspect.

    Args:
        embed_dim: Width of the tokens, C.
        width: Side of the kernel in tokens; odd, so that it has a centre.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        ValueError: `width` is not odd.

    Example:
        >>> import torch, tost
        >>> tost.nn.GridConvolution(64)(torch.randn(2, 15, 64), (3, 5)).shape
        torch.Size([2, 15, 64])
    """

    accepts = Accepts(grid=True)

    def forward(self, x: Tensor, grid: tuple[int, int] | None, mask: Tensor | None = None) -> Tensor:
        """Mix each of the tokens x [B, N, C] with those around it.

        Args:
            x: Tokens, ``[B, N, C]``, row by row.
            grid: Rows and columns; their product is N.
            mask: Real tokens, bool ``[B, N]``; the others count as beyond the edge.

        Returns:
            ``[B, N, C]``; 0 for padding.

        Raises:
            ValueError: `x` or `mask` has the wrong shape, or `grid` is missing or does not hold N tokens.
            BackendError: Context parallelism is active; a piece of a sequence does not hold all neighbours.
        """
        refuse_context("GridConvolution")
        check_width(x, self.embed_dim)
        check_mask(mask, x)
        if grid is None or grid[0] * grid[1] != x.shape[1]:
            raise ValueError(
                f"grid={grid} does not hold the {x.shape[1]} tokens of x {tuple(x.shape)}; "
                "give (rows, columns) with rows * columns = N, without class tokens."
            )
        # Tokens in row-major order are an image in channels-last layout: these are views, not copies.
        image = zero_padding(x, mask).reshape(x.shape[0], *grid, self.embed_dim).permute(0, 3, 1, 2)
        mixed = F.conv2d(image, self.weight, padding=self.width // 2, groups=self.embed_dim)
        return zero_padding(mixed.permute(0, 2, 3, 1).flatten(1, 2), mask)


class SequenceConvolution(_Centred, OrderedMixer):
    """Mixes each token with its neighbours on both sides, feature by feature; zero beyond the ends of the sequence.

    .. code-block:: text

        y[n] = sum_{k < K} weight[:, k] * x[n + k - (K - 1) / 2]

    This is `GridConvolution` for sequences in a `Block`, whose identity is not part of the kernel either. Neighbours
    are real tokens: those that a mask leaves between them are passed over, so a mask is a deletion. Arguments are those
    of `GridConvolution`; the width is the number of taps, K.

    Example:
        >>> import torch, tost
        >>> tost.nn.SequenceConvolution(64, width=5)(torch.randn(2, 15, 64)).shape
        torch.Size([2, 15, 64])
    """

    def _run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        reach = self.width // 2
        return _correlated(F.pad(x, (0, 0, reach, reach)), self.weight)


def _last(seen: Tensor, count: int, mask: Tensor | None) -> Tensor:
    """Return the last `count` tokens of seen [B, count + N, C], whose real ones, counted by mask [B, N], come first."""
    if mask is None:
        return seen[:, seen.shape[1] - count :]
    index = mask.sum(dim=1, keepdim=True) + torch.arange(count, device=seen.device)
    return seen.gather(1, index.unsqueeze(-1).expand(-1, -1, seen.shape[2]))


def _last_packed(seen: Tensor, packing: Packing, shape: torch.Size) -> Tensor:
    """Return the last tokens of each packed sequence of seen [1, T, C], as many as the shape [S, count, C] says."""
    last = packing.cu_seqlens[1:].unsqueeze(1) + torch.arange(-shape[1], 0, device=seen.device)
    return seen.squeeze(0).index_select(0, last.flatten()).reshape(shape)


def _correlated(seen: Tensor, weight: Tensor) -> Tensor:
    """Return `_correlate`, in the dtype of the tokens and with the faster derivative where that is possible."""
    correlate = _correlate if is_transformed() else _Convolution.apply
    y: Tensor = correlate(seen, weight.to(seen.dtype))
    return y


def _correlate(seen: Tensor, weight: Tensor) -> Tensor:
    """Return the sums over taps ``y[n] = sum_k weight[:, k] * seen[n + k]``, [B, N, C], of seen [B, N + K - 1, C]."""
    K = weight.shape[1]
    N = seen.shape[1] - K + 1
    # An exported graph is for any number of tokens.
    many = torch.compiler.is_exporting() or N >= _FEW
    if many and (seen.dtype != torch.float64 or seen.device.type != "cpu"):
        # Tokens are an image of one row in channels-last layout: a view, and the layout that is fastest.
        image = seen.unsqueeze(1).permute(0, 3, 1, 2)
        y = F.conv2d(image, weight[:, None, None], groups=weight.shape[0]).permute(0, 2, 3, 1).squeeze(1)
        return y.to(seen.dtype)  # autocast computes in less
    wide, taps = (x.to(statistics_dtype(seen.dtype)) for x in (seen, weight))
    y = wide[:, :N] * taps[:, 0]
    for k in range(1, K):
        y = torch.addcmul(y, wide[:, k : k + N], taps[:, k])
    return y.to(seen.dtype)


class _Convolution(torch.autograd.Function):
    """torch's own derivative of such a convolution by its kernel takes ten times as long as all the rest."""

    @staticmethod
    def forward(ctx: Any, seen: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(seen, weight)
        return _correlate(seen, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        seen, weight = ctx.saved_tensors
        if wants_graph():
            return gradients(_correlate, (seen, weight), grad)
        reach = weight.shape[1] - 1
        d_seen = _correlate(F.pad(grad, (0, 0, reach, reach)), weight.flip(1)) if ctx.needs_input_grad[0] else None
        return d_seen, _kernel_gradient(seen, grad, weight) if ctx.needs_input_grad[1] else None


def _kernel_gradient(seen: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    B, N, C = grad.shape
    step = N if torch.compiler.is_compiling() or grad.device.type != "cpu" else max(1, _CHUNK_NUMEL // max(1, B * C))
    total = torch.zeros(weight.shape[::-1], dtype=statistics_dtype(grad.dtype), device=grad.device)
    for begin in range(0, N, max(1, step)):
        piece = grad[:, begin : begin + step].to(total.dtype)
        for k in range(weight.shape[1]):
            total[k] += (piece * seen[:, begin + k : begin + k + piece.shape[1]]).sum(dim=(0, 1))
    return total.t().to(weight.dtype)
