"""Causal TSSA as its equations read. Every other implementation is compared with this one.

Shapes: w [B, N, H, D] (batch, tokens, heads, head width), temperature, decay [H], mask [B, N], pi [B, N, H]; bias and
scale come per token, [B, N, H] or [1, N, H].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, statistics_dtype, zero_padding
from tost.ops.causal_tssa._sums import Sums, empty_sums

__all__ = ["causal_membership_reference", "causal_tssa_reference"]


def causal_membership_reference(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    before: Sums | None,
    scale: Tensor | None,
    decay: Tensor | None,
) -> Tensor:
    """Return the memberships pi [B, N, H]; rows of real tokens sum to 1, rows of padding are 0."""
    before = empty_sums(w) if before is None else before
    squares = zero_padding(w.to(statistics_dtype(w.dtype)), mask).square()
    prefix, _ = _running(squares, before.squares, decay, mask)
    share = squares / prefix.clamp_min(PREFIX_FLOOR)
    if scale is not None:
        share = share * scale.unsqueeze(-1)
    if bias is not None:
        share = share + bias.unsqueeze(-1)
    pi = (temperature.to(share.dtype) * share.sum(dim=-1)).softmax(dim=-1)
    return zero_padding(pi, mask)


def causal_tssa_reference(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    before: Sums | None,
    scale: Tensor | None,
    decay: Tensor | None,
) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    before = empty_sums(w) if before is None else before
    pi = causal_membership_reference(w, temperature, bias, mask, before, scale, decay)
    v = zero_padding(w.to(pi.dtype), mask)
    _, squares = _running(v.square(), before.squares, decay, mask)
    weighted, weighted_squares = _running(pi.unsqueeze(-1) * v.square(), before.weighted_squares, decay, mask)
    mass, mass_after = _running(pi.unsqueeze(-1), before.mass.unsqueeze(-1), decay, mask)
    moment = weighted / (mass + MASS_FLOOR)
    y = -pi.unsqueeze(-1) * v / (1 + moment)
    return zero_padding(y, mask).to(w.dtype), Sums(squares, weighted_squares, mass_after.squeeze(-1))


def _running(x: Tensor, before: Tensor, decay: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums of x [B, N, H, F] up to every token, after those before [B, H, F], and after the last token."""
    if decay is None:
        return before.unsqueeze(1) + x.cumsum(dim=1), before + x.sum(dim=1)
    total, totals = before, []
    for n in range(x.shape[1]):
        factor = decay if mask is None else torch.where(mask[:, n, None], decay, 1)
        total = factor.unsqueeze(-1) * total + x[:, n]
        totals.append(total)
    return torch.stack(totals, dim=1) if totals else x, total
