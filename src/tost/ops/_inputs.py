"""The tensors of a call as every implementation takes them.

Positions are settled before an implementation runs, so none of them deals with padding on the left, continued sequences
or the length of the bias table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tost.ops._blocks import packed_width
from tost.ops._count import effective_count
from tost.ops._numerics import statistics_dtype
from tost.ops.form import Form
from tost.ops.packing import Packing
from tost.ops.state import CausalArguments


class Sums(NamedTuple):
    """The three sums of `TSSAState`, without the position."""

    squares: Tensor
    weighted_squares: Tensor
    mass: Tensor


class Inputs(NamedTuple):
    """The tensors of a call. `bias` to `decay` belong to the causal operator, in the dtype of the statistics.

    Packed sequences are in one row: B is 1, N the number of all tokens, and the sums before have S entries.

    Attributes:
        w: Tokens, ``[B, N, H, D]``.
        temperature: ``[H]``.
        mask: Real tokens, bool ``[B, N]``.
        bias: Added to each feature's share of the energy, per token, ``[B or 1, N, H]``.
        before: The sums before the first token; None for zeros.
        scale: What energies are multiplied by before the bias is added, per token, ``[B or 1, N, H]``.
        decay: What sums are multiplied by before a token is added, ``[H]``.
        packing: Where the sequences of the row begin; None if each row is one.
    """

    w: Tensor
    temperature: Tensor
    mask: Tensor | None
    bias: Tensor | None = None
    before: Sums | None = None
    scale: Tensor | None = None
    decay: Tensor | None = None
    packing: Packing | None = None

    def in_one_row(self, packing: Packing | None) -> Inputs:
        """Return the tensors with all tokens of a packed batch in one row."""
        if packing is None:
            return self
        w, mask, *of_tokens = self.w, self.mask, self.bias, self.scale
        bias, scale = (None if x is None else packing.one_row(x.expand(w.shape[0], -1, -1)) for x in of_tokens)
        mask = None if mask is None else packing.one_row(mask)
        return self._replace(w=packing.one_row(w), mask=mask, bias=bias, scale=scale, packing=packing)

    def sequences(self) -> list[Inputs]:
        """Return each of the packed sequences alone."""
        assert self.packing is not None
        lengths, S = self.packing.lengths, self.packing.num_sequences
        nothing = [None] * S
        of_tokens = (self.w, self.mask, self.bias, self.scale)
        w, mask, bias, scale = (nothing if x is None else torch.split(x, lengths, dim=1) for x in of_tokens)
        before = nothing if self.before is None else [Sums(*(x[i : i + 1] for x in self.before)) for i in range(S)]
        return [
            Inputs(w[i], self.temperature, mask[i], bias[i], before[i], scale[i], self.decay)  # type: ignore[arg-type]
            for i in range(S)
        ]


def causal_inputs(form: Form, packing: Packing | None, *given: *CausalArguments) -> Inputs:
    """Return the tensors of a causal call, with the bias and the scale of each token for tables and positions."""
    w, temperature, bias, mask, state, decay = given
    dtype = statistics_dtype(w.dtype)
    position = None if state is None else state.position
    if bias is not None:
        bias = bias.to(dtype)
        bias = bias if bias.dim() == 3 else _bias_of_tokens(bias, w.shape[1], mask, position, packing)
    if decay is not None:
        decay = decay.to(dtype)
    scale = _count_of_tokens(w, mask, position, decay, packing) if form.count_scaled else None
    before = None if state is None else Sums(state.squares, state.weighted_squares, state.mass)
    return Inputs(w, temperature, mask, bias, before, scale, decay).in_one_row(packing)


def empty_sums(w: Tensor, form: Form) -> Sums:
    """Return the sums before the first token of w [B, N, H, D]."""
    B, _, H, D = w.shape
    zeros = w.new_zeros((B, H, D), dtype=statistics_dtype(w.dtype))
    return Sums(zeros, zeros.new_zeros((B, H, packed_width(D, form.block_size))), zeros.new_zeros((B, H)))


def _bias_of_tokens(
    bias: Tensor, num_tokens: int, mask: Tensor | None, position: Tensor | None, packing: Packing | None
) -> Tensor:
    """Look up the bias of every token in a table [H, L]; [B, N, H], or [1, N, H] where all sequences are alike."""
    if mask is None and position is None and packing is None:
        return bias[:, :num_tokens].t().unsqueeze(0)
    return bias.t()[_index_of_tokens(bias, num_tokens, mask, position, packing)]


def _count_of_tokens(
    w: Tensor, mask: Tensor | None, position: Tensor | None, decay: Tensor | None, packing: Packing | None
) -> Tensor:
    """Return how many tokens the statistics of every token are taken over: those up to and including it.

    With a decay [H] a token counts less with every token after it. The result is [B, N, H], or [1, N, H] where all
    sequences are alike; 1 for padding.
    """
    count = _index_of_tokens(w, w.shape[1], mask, position, packing) + 1
    if decay is None:
        return count.to(statistics_dtype(w.dtype)).unsqueeze(-1).expand(-1, -1, w.shape[2])
    return effective_count(decay, count)


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
