"""Causal TSSA in PyTorch with a closed-form backward pass: any device, and transparent to ``torch.compile``.

Only w, the memberships and the sums at both ends are kept for the backward pass; prefix sums are recomputed. The
derivation is in ``ops/README.md``.

Shapes: w, y [B, N, H, D], temperature [H], bias [B or 1, N, H], mask [B, N], pi [B, N, H].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, statistics_dtype, zero_padding
from tost.ops.causal_tssa._sums import Sums, empty_sums

__all__ = ["causal_tssa_lean"]


def causal_tssa_lean(
    w: Tensor, temperature: Tensor, bias: Tensor | None, mask: Tensor | None, before: Sums | None
) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    before = empty_sums(w) if before is None else before
    y, *sums = _LeanCausalTSSA.apply(w, temperature, bias, mask, *before)  # type: ignore[no-untyped-call]
    return y, Sums(*sums)


def _memberships(v: Tensor, temperature: Tensor, bias: Tensor | None, mask: Tensor | None, squares: Tensor) -> Tensor:
    square = v.square()
    energy = (square / (squares.unsqueeze(1) + square.cumsum(dim=1)).clamp_min(PREFIX_FLOOR)).sum(dim=-1)
    if bias is not None:
        energy = energy + v.shape[-1] * bias
    return zero_padding((temperature.to(v.dtype) * energy).softmax(dim=-1), mask)


def _prefixes(square: Tensor, pi: Tensor, weighted: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the floored mass [B, N, H, 1] and the weighted squares [B, N, H, D] up to every token."""
    mass = mass.unsqueeze(1) + pi.cumsum(dim=1) + MASS_FLOOR
    weighted = weighted.unsqueeze(1) + (pi.unsqueeze(-1) * square).cumsum(dim=1)
    return mass.unsqueeze(-1), weighted


def _after(square: Tensor, pi: Tensor, before: Sums) -> Sums:
    return Sums(
        before.squares + square.sum(dim=1),
        before.weighted_squares + (pi.unsqueeze(-1) * square).sum(dim=1),
        before.mass + pi.sum(dim=1),
    )


def _suffix_sum(x: Tensor) -> Tensor:
    # Reversing costs a copy; subtracting a prefix sum from the total would cancel digits at the end.
    return x.flip(1).cumsum(dim=1).flip(1)


class _LeanCausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        temperature: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        squares: Tensor,
        weighted_squares: Tensor,
        mass: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        before = Sums(squares, weighted_squares, mass)
        v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
        pi = _memberships(v, temperature, bias, mask, squares)
        prefix_mass, prefix_weighted = _prefixes(v.square(), pi, weighted_squares, mass)
        y = -pi.unsqueeze(-1) * v / (1 + prefix_weighted / prefix_mass)
        ctx.save_for_backward(w, temperature, bias, mask, pi, *before)
        return (y.to(w.dtype), *_after(v.square(), pi, before))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor, d_squares: Tensor, d_weighted: Tensor, d_mass: Tensor
    ) -> tuple[Tensor | None, ...]:
        w, temperature, bias, mask, pi, squares, weighted_squares, mass = ctx.saved_tensors
        v, o = zero_padding(w.to(pi.dtype), mask), zero_padding(dy.to(pi.dtype), mask)
        square, weight = v.square(), pi.unsqueeze(-1)
        prefix_mass, prefix_weighted = _prefixes(square, pi, weighted_squares, mass)
        gain = prefix_mass / (prefix_mass + prefix_weighted)

        # A sum up to n reaches every output from n on, so its gradient is a sum over the tokens from n on.
        reach = gain.square() * weight * o * v / prefix_mass
        mass_reach = -(reach * prefix_weighted / prefix_mass).sum(dim=-1)
        bar_weighted = d_weighted.unsqueeze(1) + _suffix_sum(reach)
        bar_mass = d_mass.unsqueeze(1) + _suffix_sum(mass_reach)
        d_pi = (v * (v * bar_weighted - o * gain)).sum(dim=-1) + bar_mass
        d_logit = pi * (d_pi - (pi * d_pi).sum(dim=-1, keepdim=True))
        d_energy = temperature.to(pi.dtype) * d_logit

        prefix = squares.unsqueeze(1) + square.cumsum(dim=1)
        inverse = 1 / prefix.clamp_min(PREFIX_FLOOR)
        square_reach = -d_energy.unsqueeze(-1) * square * inverse.square() * (prefix > PREFIX_FLOOR)
        bar_squares = d_squares.unsqueeze(1) + _suffix_sum(square_reach)
        dw = 2 * v * (weight * bar_weighted + d_energy.unsqueeze(-1) * inverse + bar_squares) - weight * o * gain

        energy = (square * inverse).sum(dim=-1)
        d_bias = None
        if bias is not None:
            energy = energy + v.shape[-1] * bias
            d_bias = (v.shape[-1] * d_energy).sum_to_size(bias.shape)
        return (
            dw.to(w.dtype),
            (d_logit * energy).sum(dim=(0, 1)).to(temperature.dtype),
            d_bias,
            None,
            d_squares + square_reach.sum(dim=1),
            d_weighted + reach.sum(dim=1),
            d_mass + mass_reach.sum(dim=1),
        )
