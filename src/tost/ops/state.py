"""The recurrent state of causal TSSA: three running sums and a count of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tost._text import html_card
from tost.ops._blocks import packed_width


class TSSAState(NamedTuple):
    """Everything that causal TSSA remembers of the tokens it has seen: ``H(2D+1)`` numbers per sequence.

    The size does not depend on how many tokens were seen. A state is a tuple of tensors and never changed in place;
    gradients flow through it, so a sequence may be processed in pieces and still be differentiated as a whole.

    Attributes:
        squares: ``sum_n w_n^2``, shape ``[B, H, D]``.
        weighted_squares: ``sum_n pi_n w_n^2``, shape ``[B, H, D]``.
        mass: ``sum_n pi_n``, shape ``[B, H]``.
        position: Number of tokens seen, padding not counted, shape ``[B]``, int64.

    Example:
        >>> import torch, tost
        >>> state = tost.TSSAState.empty(batch_size=2, num_heads=3, head_dim=4)
        >>> y, state = tost.causal_tssa_with_state(torch.randn(2, 5, 3, 4), torch.ones(3), state=state)
        >>> state.position.tolist()
        [5, 5]
    """

    squares: Tensor
    weighted_squares: Tensor
    mass: Tensor
    position: Tensor

    @classmethod
    def empty(
        cls,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> TSSAState:
        """Return the state before the first token: all zeros.

        Args:
            batch_size: Number of sequences, B.
            num_heads: Number of heads, H.
            head_dim: Width of a head, D.
            dtype: float32, or float64 for float64 tokens.
            device: Where the tokens will be.
        """
        shapes = sum_shapes(batch_size, num_heads, head_dim)
        squares, weighted_squares, mass = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        return cls(squares, weighted_squares, mass, torch.zeros(batch_size, dtype=torch.int64, device=device))

    def merge(self, other: TSSAState) -> TSSAState:
        """Return the state that has seen the tokens of both: the sums add.

        `other` must hold memberships that were found in the context of `self` (or of a common prefix), as when a
        sequence is spread over machines: the sums of a later piece depend on the ``squares`` before it.

        Args:
            other: The state of the tokens that follow those of `self`.
        """
        squares, weighted_squares, mass = (mine + theirs for mine, theirs in zip(self[:3], other[:3], strict=True))
        return TSSAState(squares, weighted_squares, mass, self.position + other.position)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TSSAState:
        """Return the state on another device or with sums of another dtype; the position stays an integer."""
        squares, weighted_squares, mass = (x.to(device=device, dtype=dtype) for x in self[:3])
        return TSSAState(squares, weighted_squares, mass, self.position.to(device=device))

    def detach(self) -> TSSAState:
        """Return the state cut off from the graph that made it, as truncated back-propagation wants."""
        return TSSAState(*(x.detach() for x in self))

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        heads = f"{self.squares.shape[1]}, {self.squares.shape[2]} squares each"
        numbers = sum(x[:1].numel() for x in self[:3])
        return html_card(
            "State of causal TSSA",
            {"tokens seen": self.position.tolist(), "heads": heads, "numbers per sequence": f"{numbers:,}"},
        )


class GatedState(NamedTuple):
    """The recurrent state of gated statistics: a mean and a covariance per block of g features.

    It holds ``H (D + D (g+1) / 2 + D / g)`` numbers per sequence, whatever the number of tokens, and is never changed
    in place. Gradients flow through it.

    Attributes:
        mean: Weighted mean of the tokens, ``[B, H, D]``.
        covariance: Weighted covariance, ``[B, H, D (g+1) / 2]``: variances first, then for each distance from 1 to
            g - 1 the products of features that far apart within a block.
        mass: Weight of all tokens so far, ``[B, H, D / g]``, at most 1.
        position: Number of tokens seen, padding not counted, ``[B]``, int64.
    """

    mean: Tensor
    covariance: Tensor
    mass: Tensor
    position: Tensor

    @classmethod
    def empty(
        cls,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        *,
        block_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> GatedState:
        """Return the state before the first token; arguments as in `TSSAState.empty`."""
        shapes = gated_shapes(batch_size, num_heads, head_dim, block_size)
        mean, covariance, mass = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        return cls(mean, covariance, mass, torch.zeros(batch_size, dtype=torch.int64, device=device))


def gated_shapes(batch_size: int, num_heads: int, head_dim: int, block_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of mean, covariance and mass."""
    rows = (batch_size, num_heads)
    return (*rows, head_dim), (*rows, packed_width(head_dim, block_size)), (*rows, head_dim // block_size)


def sum_shapes(batch_size: int, num_heads: int, head_dim: int, block_size: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the three sums of a sequence."""
    rows = batch_size, num_heads
    return (*rows, head_dim), (*rows, packed_width(head_dim, block_size)), rows


CausalArguments = tuple[Tensor, Tensor, Tensor | None, Tensor | None, TSSAState | None]
"""Arguments of the causal operator: w, temperature, bias, mask and state."""
