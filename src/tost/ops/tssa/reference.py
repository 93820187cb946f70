"""Non-causal TSSA as its equations read. Every other implementation is compared with this one.

Shapes: w [B, N, H, D] (batch, tokens, heads, head width), temperature [H], mask [B, N], pi [B, N, H].
"""

from __future__ import annotations

from torch import Tensor

from tost.ops._numerics import MASS_FLOOR, SQUARE_FLOOR, num_tokens, statistics_dtype, zero_padding

__all__ = ["membership_reference", "tssa_reference"]


def membership_reference(
    w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool
) -> Tensor:
    """Return the memberships pi [B, N, H]; rows of real tokens sum to 1, rows of padding are 0."""
    dtype = statistics_dtype(w.dtype)
    squares = zero_padding(w.to(dtype), mask).square()
    if normalize:
        squares = squares / squares.sum(dim=1, keepdim=True).clamp_min(SQUARE_FLOOR)
    energy = squares.sum(dim=-1)
    if count_scaled:
        energy = energy * num_tokens(w, mask).to(dtype)[:, None, None]
    pi = (temperature.to(dtype) * energy).softmax(dim=-1)
    return zero_padding(pi, mask)


def tssa_reference(w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w; rows of padding are 0."""
    pi = membership_reference(w, temperature, mask, normalize, count_scaled).unsqueeze(-1)
    v = zero_padding(w.to(pi.dtype), mask)
    mass = pi.sum(dim=1, keepdim=True)
    moment = (pi * v.square()).sum(dim=1, keepdim=True) / (mass + MASS_FLOOR)
    y = -pi * v / (1 + moment)
    return zero_padding(y, mask).to(w.dtype)
