"""The tensors of a call as every implementation takes them.

Positions are settled before an implementation runs, so none of them deals with padding on the left, continued sequences
or the length of the bias table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tost.ops._blocks import packed_width
from tost.ops._numerics import GATE_FLOOR, statistics_dtype, zero_padding
from tost.ops._scan import linear_recurrence
from tost.ops.packing import Packing
from tost.ops.state import CausalArguments, sum_shapes


class Sums(NamedTuple):
    """The three sums of `TSSAState`, without the position."""

    squares: Tensor
    weighted_squares: Tensor
    mass: Tensor


class Inputs(NamedTuple):
    """The tensors of a call. `bias` and `before` belong to the causal operator, in the dtype of the statistics.

    Packed sequences are in one row: B is 1, N the number of all tokens, and the sums before have S entries.

    Attributes:
        w: Tokens, ``[B, N, H, D]``.
        temperature: ``[H]``.
        mask: Real tokens, bool ``[B, N]``.
        bias: Added to each feature's share of the energy, per token, ``[B or 1, N, H]``.
        before: The sums before the first token; None for zeros.
        packing: Where the sequences of the row begin; None if each row is one.
    """

    w: Tensor
    temperature: Tensor
    mask: Tensor | None
    bias: Tensor | None = None
    before: Sums | None = None
    packing: Packing | None = None

    def in_one_row(self, packing: Packing | None) -> Inputs:
        """Return the tensors with all tokens of a packed batch in one row."""
        if packing is None:
            return self
        mask = None if self.mask is None else packing.one_row(self.mask)
        bias = None if self.bias is None else packing.one_row(self.bias.expand(self.w.shape[0], -1, -1))
        return self._replace(w=packing.one_row(self.w), mask=mask, bias=bias, packing=packing)

    def sequences(self) -> list[Inputs]:
        """Return each of the packed sequences alone."""
        assert self.packing is not None
        S, lengths = self.packing.num_sequences, self.packing.lengths
        w = torch.split(self.w, lengths, dim=1)
        mask, bias = ([None] * S if x is None else torch.split(x, lengths, dim=1) for x in (self.mask, self.bias))
        before = [None] * S if self.before is None else [Sums(*(x[i : i + 1] for x in self.before)) for i in range(S)]
        return [Inputs(w[i], self.temperature, mask[i], bias[i], before[i]) for i in range(S)]


class GatedInputs(NamedTuple):
    """The tensors of a call of gated statistics. Packed sequences are in one row, as in `Inputs`.

    Attributes:
        w: Tokens, ``[B, N, H, D]``.
        write: Gates in [0, 1], ``[B, N, H, D / g]``, in the dtype of the statistics.
        mask: Real tokens, bool ``[B, N]``.
        mean: Means before the first token, ``[B, H, D]``; None for zeros.
        covariance: Packed covariances before the first token, ``[B, H, D(g+1)/2]``; None for zeros.
        packing: Where the sequences of the row begin; None if each row is one.
    """

    w: Tensor
    write: Tensor
    mask: Tensor | None = None
    mean: Tensor | None = None
    covariance: Tensor | None = None
    packing: Packing | None = None

    @property
    def block_size(self) -> int:
        """Features in a block, g."""
        return self.w.shape[3] // self.write.shape[3]

    def in_one_row(self, packing: Packing | None) -> GatedInputs:
        """Return the tensors with all tokens of a packed batch in one row."""
        if packing is None:
            return self
        mask = None if self.mask is None else packing.one_row(self.mask)
        return self._replace(w=packing.one_row(self.w), write=packing.one_row(self.write), mask=mask, packing=packing)

    def start(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the covariance before the first token."""
        if self.mean is not None and self.covariance is not None:
            return self.mean, self.covariance
        (B, _, H, D), packing = self.w.shape, self.packing
        B = B if packing is None else packing.num_sequences
        return self.write.new_zeros(B, H, D), self.write.new_zeros(B, H, packed_width(D, self.block_size))

    def alone(self) -> list[GatedInputs]:
        """Return each of the packed sequences alone."""
        assert self.packing is not None
        lengths, (mean, covariance) = self.packing.lengths, self.start()
        w, write = (torch.split(x, lengths, dim=1) for x in (self.w, self.write))
        mask = [None] * len(lengths) if self.mask is None else torch.split(self.mask, lengths, dim=1)
        states = (torch.split(x, [1] * len(lengths)) for x in (mean, covariance))
        return [GatedInputs(*each) for each in zip(w, write, mask, *states, strict=True)]

    def zeroed(self) -> tuple[Tensor, Tensor]:
        """Return tokens in the dtype of the statistics and gates, both 0 for padding."""
        return zero_padding(self.w.to(self.write.dtype), self.mask), zero_padding(self.write, self.mask)


def relative_gates(inputs: GatedInputs, mass: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gates relative to the mass, ``z / mass[n]``, and the mass after the last token, ``[B, H, D / g]``."""
    z, packing = zero_padding(inputs.write, inputs.mask), inputs.packing
    start = z.new_zeros(len(z) if packing is None else packing.num_sequences, *z.shape[2:]) if mass is None else mass
    if z.shape[1] == 0:
        return z, start
    keep, value, before = 1 - z, z, start
    if packing is not None:  # sequences begin anew in the middle of the row
        first = packing.positions().reshape(1, -1, 1, 1) == 0
        value = torch.where(first, z + keep * start.index_select(0, packing.sequence), z)
        keep, before = keep.masked_fill(first, 0), torch.zeros_like(z[:, 0])
    running = linear_recurrence(keep.flatten(2), value.flatten(2), before.flatten(1)).reshape(z.shape)
    # Between 0 and 1 but for rounding. Without any mass so far, nothing is written.
    relative = (z / running.clamp_min(GATE_FLOOR)).clamp_max(1)
    if packing is None:
        return relative, running[:, -1]
    last = running[0].index_select(0, (packing.cu_seqlens[1:] - 1).clamp_min(0))
    return relative, last.where((packing.num_tokens() > 0)[:, None, None], start)


GatedResults = tuple[Tensor, Tensor, Tensor]
"""y, ``[B, N, H, D]`` in the dtype of the statistics, and mean and covariance after the last token."""


def causal_inputs(packing: Packing | None, *given: *CausalArguments) -> Inputs:
    """Return the tensors of a causal call, with the bias of each token for tables and positions."""
    w, temperature, bias, mask, state = given
    if bias is not None:
        bias, position = bias.to(statistics_dtype(w.dtype)), None if state is None else state.position
        bias = bias if bias.dim() == 3 else _bias_of_tokens(bias, w.shape[1], mask, position, packing)
    before = None if state is None else Sums(state.squares, state.weighted_squares, state.mass)
    return Inputs(w, temperature, mask, bias, before).in_one_row(packing)


def empty_sums(w: Tensor, num_sequences: int | None = None) -> Sums:
    """Return the sums before the first token of w [B, N, H, D], by default of B sequences."""
    B, _, H, D = w.shape
    B = B if num_sequences is None else num_sequences
    return Sums(*(w.new_zeros(shape, dtype=statistics_dtype(w.dtype)) for shape in sum_shapes(B, H, D)))


def _bias_of_tokens(
    bias: Tensor, num_tokens: int, mask: Tensor | None, position: Tensor | None, packing: Packing | None
) -> Tensor:
    """Look up the bias of every token in a table [H, L]; [B, N, H], or [1, N, H] where all sequences are alike."""
    if mask is None and position is None and packing is None:
        return bias[:, :num_tokens].t().unsqueeze(0)
    return bias.t()[_index_of_tokens(bias, num_tokens, mask, position, packing)]


def _index_of_tokens(
    like: Tensor, num_tokens: int, mask: Tensor | None, position: Tensor | None, packing: Packing | None
) -> Tensor:
    """Return every token's place in its sequence, int64 [B or 1, N]; 0 for padding."""
    if packing is not None:
        return packing.positions(mask, position)
    index = torch.arange(num_tokens, device=like.device).unsqueeze(0) if mask is None else mask.cumsum(dim=1) - 1
    if position is not None:
        index = index + position.unsqueeze(1)
    return index if mask is None else index.where(mask, 0)
