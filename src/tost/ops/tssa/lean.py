"""Non-causal TSSA in PyTorch with a closed-form backward pass: any device, and transparent to ``torch.compile``.

Autograd through the reference keeps half a dozen tensors of the size of w. Here only w itself, the memberships and the
sums are kept; everything else is recomputed. The derivation is in ``ops/README.md``.

Shapes: w, y [B, N, H, D], temperature [H], mask [B, N], pi [B, N, H], sums [B, 1, H, D] or [B, 1, H].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost.ops._numerics import MASS_FLOOR, SQUARE_FLOOR, num_tokens, statistics_dtype, zero_padding

__all__ = ["tssa_lean"]


def tssa_lean(w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w."""
    y: Tensor = _LeanTSSA.apply(w, temperature, mask, normalize, count_scaled)  # type: ignore[no-untyped-call]
    return y


def _forward(
    v: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return pi, the sums of squares (None without normalisation), the gain 1 / (1 + moment) and the floored mass."""
    scale = _scale(v, temperature, mask, count_scaled)
    square = v.square()
    squares = None
    if normalize:
        squares = square.sum(dim=1, keepdim=True)
        energy = (square / squares.clamp_min(SQUARE_FLOOR)).sum(dim=-1)
    else:
        energy = square.sum(dim=-1)
    pi = zero_padding((scale * energy).softmax(dim=-1), mask)
    mass = pi.sum(dim=1, keepdim=True) + MASS_FLOOR
    weighted = (pi.unsqueeze(-1) * square).sum(dim=1, keepdim=True)
    gain = 1 / (1 + weighted / mass.unsqueeze(-1))
    return pi, squares, gain, mass


def _scale(v: Tensor, temperature: Tensor, mask: Tensor | None, count_scaled: bool) -> Tensor:
    """Return what an energy is multiplied by to give a logit: the temperature, times n if scaled; [H] or [B, 1, H]."""
    temperature = temperature.to(v.dtype)
    return temperature * num_tokens(v, mask).to(v.dtype)[:, None, None] if count_scaled else temperature


class _LeanTSSA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool
    ) -> Tensor:
        v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
        pi, squares, gain, mass = _forward(v, temperature, mask, normalize, count_scaled)
        ctx.count_scaled = count_scaled
        ctx.save_for_backward(w, temperature, mask, pi, squares, gain, mass)
        return (-pi.unsqueeze(-1) * v * gain).to(w.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        w, temperature, mask, pi, squares, gain, mass = ctx.saved_tensors
        v, o = zero_padding(w.to(pi.dtype), mask), zero_padding(dy.to(pi.dtype), mask)
        square, weight = v.square(), pi.unsqueeze(-1)

        # moment = weighted / mass, gain = 1 / (1 + moment)
        d_weighted = gain.square() * (weight * o * v).sum(dim=1, keepdim=True) / mass.unsqueeze(-1)
        d_mass = -(d_weighted * (1 / gain - 1)).sum(dim=-1)
        d_pi = (v * (v * d_weighted - o * gain)).sum(dim=-1) + d_mass
        d_logit = pi * (d_pi - (pi * d_pi).sum(dim=-1, keepdim=True))
        d_energy = _scale(v, temperature, mask, ctx.count_scaled) * d_logit

        through_sums = weight * d_weighted
        if squares is None:
            energy = square.sum(dim=-1)
            through_sums = through_sums + d_energy.unsqueeze(-1)
        else:
            inverse = 1 / squares.clamp_min(SQUARE_FLOOR)
            energy = (square * inverse).sum(dim=-1)
            # Multiplied one by one: the square of the inverse may leave float32.
            d_squares = -inverse * (inverse * (square * d_energy.unsqueeze(-1)).sum(dim=1, keepdim=True))
            d_squares = d_squares.where(squares > SQUARE_FLOOR, 0)
            through_sums = through_sums + inverse * d_energy.unsqueeze(-1) + d_squares
        dw = 2 * v * through_sums - weight * o * gain
        if ctx.count_scaled:
            energy = energy * num_tokens(v, mask)[:, None, None]
        d_temperature = (d_logit * energy).sum(dim=(0, 1))
        return dw.to(w.dtype), d_temperature.to(temperature.dtype), None, None, None
