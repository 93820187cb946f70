"""Bases of the token mixers, and the one way to call them.

Shapes: x [B, N, C] (batch, tokens, width), parts [B, N, P, H, D] with C = H * D, mask [B, N].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.nn._checks import Factory, check_heads, check_width, refuse_context
from tost.nn.state import Carry, Continues, State
from tost.ops import Packing
from tost.ops._checks import check_mask
from tost.ops._numerics import zero_padding
from tost.ops._transforms import has_values
from tost.ops.packing import Group


class Accepts(NamedTuple):
    """The inputs that a token mixer takes besides ``mixer(x, mask)``; its attribute ``accepts``.

    Attributes:
        packing: Packed sequences, as the keyword `packing`. Others get a batch that is padded to the longest sequence.
        grid: Rows and columns of the tokens, as the keyword `grid`.
        shared: Pieces of sequences that several processes share.
        state: Type of the state from which ``forward_with_state(x, state, mask)`` continues; None if it has none.
    """

    packing: bool = False
    grid: bool = False
    shared: bool = False
    state: type | None = None


def accepted(mixer: nn.Module | None) -> Accepts:
    """Return the inputs that a mixer takes; of a class from elsewhere without the attribute, tokens and a mask."""
    return getattr(mixer, "accepts", Accepts())


def mix(
    mixer: nn.Module,
    x: Tensor,
    mask: Tensor | None,
    packing: Packing | None = None,
    grid: tuple[int, int] | None = None,
    carry: Carry | None = None,
) -> Tensor:
    """Call a mixer with those inputs that it accepts, on each sequence alone where several are packed.

    Args:
        mixer: Mixes tokens, from ``[B, N, C]`` to ``[B, N, C]``; a convolution, for example.
        x: Tokens, ``[B, N, C]``.
        mask: Real tokens, bool ``[B, N]``.
        packing: Bounds of packed sequences; None if each row is one.
        grid: Rows and columns of the tokens, if they have any.
        carry: A state to continue from, which is replaced by the one after these tokens.

    Raises:
        BackendError: Sequences are packed, and processes share them.
        ConfigError: Sequences are packed, but the mixer works on a grid.
    """
    accepts, model = accepted(mixer), cast(Any, mixer)
    if accepts.grid:
        if packing is not None:
            raise ConfigError(
                f"{type(mixer).__name__} works on the grid of one image, but the batch is packed; use a model without "
                "convolutions in its blocks, or images of one size."
            )
        return model(x, mask=mask, grid=grid)
    more = {"packing": packing} if packing is not None and accepts.packing else {}
    rows: Group | None = None
    tokens, real = x, mask
    if packing is not None and not more:
        refuse_context("a packed batch")
        rows = packing.rows()
        tokens, real = rows.take(x), rows.mask(mask)
    if carry is None:
        mixed: Tensor = model(tokens, real, **more)
    else:
        mixed, carry.state = model.forward_with_state(tokens, carry.state, real, **more)
    return mixed if rows is None else rows.put(mixed, x)


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
    # Padding is behind already, as is usual; where the data cannot be looked at, tokens are sorted.
    if mask is None or (has_values(mask) and not bool((mask[:, 1:] > mask[:, :-1]).any())):
        return mix(x, mask)
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return _take(mix(_take(x, order), mask.gather(1, order)), order.argsort(dim=1))


def real_last(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the tokens x [B, N, ...] with all padding in front of the real ones."""
    return x if mask is None else _take(x, mask.to(torch.uint8).argsort(dim=1, stable=True))


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Return the tokens of x [B, N, ...] in the order [B, N]."""
    return x.gather(1, order.reshape(*order.shape, *(1,) * (x.dim() - 2)).expand_as(x))


class LinearProjections(Factory, total=False):
    """Arguments of `ProjectedMixer` that a subclass without attention weights passes on."""

    in_bias: bool
    out_bias: bool
    out_drop: float
    value_conv: nn.Module | None


class Projections(LinearProjections, total=False):
    """Arguments of `ProjectedMixer` that a subclass passes on."""

    attn_drop: float


class ProjectedMixer(nn.Module):
    """A projection into heads, a way of mixing tokens, a projection back; subclasses supply the middle.

    Args:
        embed_dim: Width of the tokens, C.
        num_heads: Number of heads, H; divides C.
        in_bias: Bias of the first projection, to queries, keys and values.
        out_bias: Bias of the output projection.
        attn_drop: Dropout on the attention weights.
        out_drop: Dropout on the output.
        device: Where the parameters live.
        dtype: Type of the parameters.
        value_conv: Adds the neighbours of each token's values to what comes out of the middle, such as
            `GridConvolution`; for mixers of whole sequences.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or the mixer is causal and there is a `value_conv`.
    """

    parts: ClassVar[int] = 3
    """Number of vectors of width C that the first projection makes of a token; the last are the values."""
    accepts: Accepts = Accepts()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        in_bias: bool = True,
        out_bias: bool = True,
        attn_drop: float = 0.0,
        out_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        value_conv: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.proj_in = nn.Linear(embed_dim, self.parts * embed_dim, bias=in_bias, device=device, dtype=dtype)
        self.proj_out = nn.Linear(embed_dim, embed_dim, bias=out_bias, device=device, dtype=dtype)
        self.attn_drop, self.out_drop = attn_drop, out_drop
        if value_conv is not None and type(self).forward is not ProjectedMixer.forward:
            raise ValueError(f"{type(self).__name__} is causal and takes no value_conv; leave it out.")
        self.value_conv = value_conv
        self.accepts = self.accepts._replace(grid=accepted(value_conv).grid)
        self._add_parameters(device, dtype)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"

    def forward(self, x: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        """Mix the tokens x [B, N, C].

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``; the others are ignored, and their output is the bias.
            grid: Rows and columns of the tokens; needed by a `value_conv` over a grid.

        Returns:
            ``[B, N, C]``.

        Raises:
            ValueError: `x` or `mask` has the wrong shape or dtype.
            BackendError: Context parallelism is active; this mixer needs whole sequences.
        """
        parts = self._project_in(x, mask)
        y = self._mix(parts, mask)
        if self.value_conv is not None:
            y = y + mix(self.value_conv, parts[:, :, -1].flatten(2), mask, None, grid).reshape(y.shape)
        return self._project_out(y, mask)

    def _project_in(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the parts [B, N, P, H, D] of x [B, N, C], zero for padding."""
        if not self.accepts.shared:
            refuse_context(type(self).__name__)
        check_width(x, self.embed_dim)
        check_mask(mask, x)
        projected = zero_padding(self.proj_in(x), mask)
        return projected.reshape(*x.shape[:2], self.parts, self.num_heads, self.head_dim)

    def _project_out(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """Return [B, N, C] of y [B, N, H, D]."""
        return F.dropout(self.proj_out(zero_padding(y, mask).flatten(2)), self.out_drop, self.training)

    def _add_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Make the parameters that a subclass has besides the projections."""

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        """Return [B, N, H, D] of parts [B, N, P, H, D]. Padding is zero on the way in; it is made so on the way out."""
        raise NotImplementedError

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return softmax(q k^T / sqrt(D)) v over the real tokens; everything is [B, N, H, D]."""
        if mask is not None:
            # A sequence of padding only has nothing to attend to, and a softmax over nothing is not a number.
            mask = (mask | ~mask.any(dim=1, keepdim=True))[:, None, None, :]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return self._softmax(query, key, value, mask).transpose(1, 2)

    def _softmax(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(D)) v, with dropout on the weights; everything is [..., N, D]."""
        drop = self.attn_drop if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop, is_causal=causal)


class CausalMixer(ProjectedMixer, Continues[State]):
    """A projected mixer that can continue a sequence; subclasses advance the state."""

    def forward(  # type: ignore[override]  # a causal mixer takes a state and no grid
        self, x: Tensor, mask: Tensor | None = None, *, carry: Carry | None = None
    ) -> Tensor:
        """Mix the tokens x [B, N, C], each with those before it.

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``, padding anywhere; it is ignored and gets the output bias.
            carry: A state to continue from, which is replaced by the one after these tokens; see `forward_with_state`.

        Returns:
            ``[B, N, C]``.

        Raises:
            ValueError: `x`, `mask` or the state has the wrong shape or dtype.
            BackendError: Context parallelism is active, and this mixer needs whole sequences.
        """
        parts = self._project_in(x, mask)
        y, after = self._advance(x, parts, None if carry is None else carry.state, mask)
        if carry is not None:
            carry.state = after
        return self._project_out(y, mask)

    @abstractmethod
    def _advance(self, x: Tensor, parts: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, State]:
        """Return the outputs [B, N, H, D] of tokens x with parts [B, N, P, H, D], and the state after them."""
