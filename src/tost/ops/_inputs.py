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
from tost.ops.state import CausalArguments


class Sums(NamedTuple):
    """The three sums of `TSSAState`, without the position."""

    squares: Tensor
    weighted_squares: Tensor
    mass: Tensor


class Inputs(NamedTuple):
    """The tensors of a call. The last four belong to the causal operator, in the dtype of the statistics.

    Attributes:
        w: Tokens, ``[B, N, H, D]``.
        temperature: ``[H]``.
        mask: Real tokens, bool ``[B, N]``.
        bias: Added to each feature's share of the energy, per token, ``[B or 1, N, H]``.
        before: The sums before the first token; None for zeros.
        scale: What energies are multiplied by before the bias is added, per token, ``[B or 1, N, H]``.
        decay: What sums are multiplied by before a token is added, ``[H]``.
    """

    w: Tensor
    temperature: Tensor
    mask: Tensor | None
    bias: Tensor | None = None
    before: Sums | None = None
    scale: Tensor | None = None
    decay: Tensor | None = None


def causal_inputs(form: Form, *given: *CausalArguments) -> Inputs:
    """Return the tensors of a causal call, with the bias and the scale of each token for tables and positions."""
    w, temperature, bias, mask, state, decay = given
    dtype = statistics_dtype(w.dtype)
    position = None if state is None else state.position
    if bias is not None:
        bias = bias.to(dtype)
        bias = bias if bias.dim() == 3 else _bias_of_tokens(bias, w.shape[1], mask, position)
    if decay is not None:
        decay = decay.to(dtype)
    scale = _count_of_tokens(w, mask, position, decay) if form.count_scaled else None
    before = None if state is None else Sums(state.squares, state.weighted_squares, state.mass)
    return Inputs(w, temperature, mask, bias, before, scale, decay)


def empty_sums(w: Tensor, form: Form) -> Sums:
    """Return the sums before the first token of w [B, N, H, D]."""
    B, _, H, D = w.shape
    zeros = w.new_zeros((B, H, D), dtype=statistics_dtype(w.dtype))
    return Sums(zeros, zeros.new_zeros((B, H, packed_width(D, form.block_size))), zeros.new_zeros((B, H)))


def _bias_of_tokens(bias: Tensor, num_tokens: int, mask: Tensor | None, position: Tensor | None) -> Tensor:
    """Look up the bias of every token in a table [H, L]; [B, N, H], or [1, N, H] where all sequences are alike."""
    if mask is None and position is None:
        return bias[:, :num_tokens].t().unsqueeze(0)
    return bias.t()[_index_of_tokens(bias, num_tokens, mask, position)]


def _count_of_tokens(w: Tensor, mask: Tensor | None, position: Tensor | None, decay: Tensor | None) -> Tensor:
    """Return how many tokens the statistics of every token are taken over: those up to and including it.

    With a decay [H] a token counts less with every token after it. The result is [B, N, H], or [1, N, H] where all
    sequences are alike; 1 for padding.
    """
    count = _index_of_tokens(w, w.shape[1], mask, position) + 1
    if decay is None:
        return count.to(statistics_dtype(w.dtype)).unsqueeze(-1).expand(-1, -1, w.shape[2])
    return effective_count(decay, count)


def _index_of_tokens(like: Tensor, num_tokens: int, mask: Tensor | None, position: Tensor | None) -> Tensor:
    """Return every token's place in its sequence, int64 [B or 1, N]; 0 for padding."""
    index = torch.arange(num_tokens, device=like.device).unsqueeze(0) if mask is None else mask.cumsum(dim=1) - 1
    if position is not None:
        index = index + position.unsqueeze(1)
    return index if mask is None else index.where(mask, 0)
