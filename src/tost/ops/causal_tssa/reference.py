"""Causal TSSA as its equations read. Every other implementation is compared with this one.

Shapes: w [B, N, H, D] (batch, tokens, heads, head width), temperature [H], mask [B, N], pi [B, N, H]; the bias comes
per token, [B, N, H] or [1, N, H].
"""

from __future__ import annotations

from torch import Tensor

from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, statistics_dtype, zero_padding
from tost.ops.causal_tssa._sums import Sums, empty_sums

__all__ = ["causal_membership_reference", "causal_tssa_reference"]


def causal_membership_reference(
    w: Tensor, temperature: Tensor, bias: Tensor | None, mask: Tensor | None, before: Sums | None
) -> Tensor:
    """Return the memberships pi [B, N, H]; rows of real tokens sum to 1, rows of padding are 0."""
    before = empty_sums(w) if before is None else before
    squares = zero_padding(w.to(statistics_dtype(w.dtype)), mask).square()
    prefix = before.squares.unsqueeze(1) + squares.cumsum(dim=1)
    share = squares / prefix.clamp_min(PREFIX_FLOOR)
    if bias is not None:
        share = share + bias.unsqueeze(-1)
    pi = (temperature.to(share.dtype) * share.sum(dim=-1)).softmax(dim=-1)
    return zero_padding(pi, mask)


def causal_tssa_reference(
    w: Tensor, temperature: Tensor, bias: Tensor | None, mask: Tensor | None, before: Sums | None
) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    before = empty_sums(w) if before is None else before
    pi = causal_membership_reference(w, temperature, bias, mask, before)
    v = zero_padding(w.to(pi.dtype), mask)
    weighted = pi.unsqueeze(-1) * v.square()
    mass = before.mass.unsqueeze(1) + pi.cumsum(dim=1)
    moment = (before.weighted_squares.unsqueeze(1) + weighted.cumsum(dim=1)) / (mass + MASS_FLOOR).unsqueeze(-1)
    y = -pi.unsqueeze(-1) * v / (1 + moment)
    after = Sums(
        squares=before.squares + v.square().sum(dim=1),
        weighted_squares=before.weighted_squares + weighted.sum(dim=1),
        mass=before.mass + pi.sum(dim=1),
    )
    return zero_padding(y, mask).to(w.dtype), after
