"""Non-causal TSSA over ranks: two sums over all ranks forward, two backward, each of a fixed size.

The equations are those of ``ops/README.md``. Every sum over the tokens is a sum over this rank's tokens, then over the
ranks. As in the other implementations w, the memberships and the sums are kept, and the rest is recomputed.

Shapes: w, y [B, N, H, D] (N tokens of this rank), temperature [H], mask [B, N], pi [B, N, H], sums [B, H, D] or [B, H].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost.ops._inputs import Inputs
from tost.ops._numerics import MASS_FLOOR, SQUARE_FLOOR, statistics_dtype, zero_padding
from tost.ops.form import Form
from tost.ops.pytorch import block_tssa
from tost.parallel._autograd import accumulate, chunks, sum_over_ranks, tokens_of
from tost.parallel._channel import Channel, untraced


@untraced
def tssa(inputs: Inputs, form: Form, channel: Channel) -> Tensor:
    """Run `tost.tssa` on sequences of which this rank holds a piece; return y of its tokens.

    Each rank sends ``4 B H (2D+1)`` bytes forward and ``8 B H D`` backward (statistics in float32), in two
    collectives each, whatever the length of the sequence; without normalization it is one collective each. With blocks
    of g features the sums that depend on memberships are ``D(g+1)/2`` products where there were D squares. Packed
    sequences are taken in groups of similar lengths, each with these exchanges for B sequences, after one that counts
    their tokens.
    """
    w, temperature, mask, packing = inputs.w, inputs.temperature, inputs.mask, inputs.packing
    if packing is None:
        return _run(w, temperature, mask, form, channel)
    # Every rank has to make the same groups, so they go by the lengths of whole sequences.
    lengths = channel.all_reduce(packing.num_tokens()).tolist()
    y = torch.zeros_like(w)
    for group in packing.groups(lengths):
        y = y + group.put(_run(group.take(w), temperature, group.mask(mask), form, channel), w)
    return y


def _run(w: Tensor, temperature: Tensor, mask: Tensor | None, form: Form, channel: Channel) -> Tensor:
    """Return y of this rank's tokens, each row a piece of another sequence."""
    if form.block_size > 1:
        return block_tssa(Inputs(w, temperature, mask), form, lambda x: sum_over_ranks(x, channel))
    return _SharedTSSA.apply(w, temperature, mask, form, channel)  # type: ignore[no-untyped-call]


class _SharedTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, temperature: Tensor, mask: Tensor | None, form: Form, channel: Channel) -> Tensor:
        cuts, squares = chunks(w), None
        scale = temperature.to(statistics_dtype(w.dtype))
        if form.normalize:
            squares = channel.all_reduce(accumulate(tokens_of(w, mask, rows).square().sum(dim=1) for rows in cuts))
        pi = torch.empty(w.shape[:3], dtype=statistics_dtype(w.dtype), device=w.device)

        def assign(rows: slice) -> Tensor:
            """Fill in the memberships of these tokens; return their weighted squares and mass, [B, H, D + 1]."""
            square = tokens_of(w, mask, rows).square()
            energy = square.sum(dim=-1) if squares is None else (square * _inverse(squares)).sum(dim=-1)
            assigned = (scale * energy).softmax(dim=-1)
            pi[:, rows] = zero_padding(assigned, None if mask is None else mask[:, rows])
            weight = pi[:, rows].unsqueeze(-1)
            return torch.cat(((weight * square).sum(dim=1), weight.sum(dim=1)), dim=-1)

        sums = channel.all_reduce(accumulate(map(assign, cuts)))
        mass = sums[..., -1:] + MASS_FLOOR
        gain = mass / (mass + sums[..., :-1])
        y = torch.empty(w.shape, dtype=w.dtype, device=w.device)
        for rows in cuts:
            y[:, rows] = tokens_of(w, mask, rows) * pi[:, rows].unsqueeze(-1) * -gain.unsqueeze(1)
        ctx.channel = channel
        ctx.save_for_backward(w, temperature, mask, pi, squares, gain, mass)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w, temperature, mask, pi, squares, gain, mass = ctx.saved_tensors
        cuts, weight, gains = chunks(w), pi.unsqueeze(-1), gain.unsqueeze(1)
        scale = temperature.to(pi.dtype)

        def reach(rows: slice) -> Tensor:
            v, o = tokens_of(w, mask, rows), tokens_of(dy, mask, rows)
            return (weight[:, rows] * v * o).sum(dim=1)

        # moment = weighted / mass, gain = 1 / (1 + moment)
        d_weighted = gain.square() * ctx.channel.all_reduce(accumulate(map(reach, cuts))) / mass
        d_mass = -(d_weighted * (1 / gain - 1)).sum(dim=-1).unsqueeze(1)
        d_weighted = d_weighted.unsqueeze(1)
        d_logit = torch.empty_like(pi)

        def descend(rows: slice) -> Tensor:
            """Fill in the gradient of these tokens' logits; return its sum with their squares, [B, H, D]."""
            v, o = tokens_of(w, mask, rows), tokens_of(dy, mask, rows)
            d_pi = (v * (v * d_weighted - o * gains)).sum(dim=-1) + d_mass
            d_logit[:, rows] = pi[:, rows] * (d_pi - (pi[:, rows] * d_pi).sum(dim=-1, keepdim=True))
            return (v.square() * d_logit[:, rows].unsqueeze(-1)).sum(dim=1)

        slope = accumulate(map(descend, cuts))
        inverse, d_squares = _through_squares(slope, scale, squares, ctx.channel)
        d_energy = (scale * d_logit).unsqueeze(-1)
        dw = torch.empty(w.shape, dtype=w.dtype, device=w.device)
        for rows in cuts:
            v, o = tokens_of(w, mask, rows), tokens_of(dy, mask, rows)
            through_sums = weight[:, rows] * d_weighted + d_energy[:, rows] * inverse + d_squares
            dw[:, rows] = 2 * v * through_sums - weight[:, rows] * o * gains
        d_temperature = (slope * inverse.squeeze(1)).sum(dim=(0, -1))
        return dw, d_temperature.to(temperature.dtype), None, None, None


def _inverse(squares: Tensor) -> Tensor:
    return (1 / squares.clamp_min(SQUARE_FLOOR)).unsqueeze(1)


def _through_squares(slope: Tensor, scale: Tensor, squares: Tensor | None, channel: Channel) -> tuple[Tensor, Tensor]:
    """Return what a square contributes to the energy, and the gradient of the sums of squares, both [B, 1, H, D]."""
    if squares is None:
        return torch.ones_like(slope).unsqueeze(1), torch.zeros_like(slope).unsqueeze(1)
    inverse = _inverse(squares)
    # Multiplied one by one: the square of the inverse may leave float32.
    d_squares = -inverse * (inverse * channel.all_reduce(scale.unsqueeze(-1) * slope).unsqueeze(1))
    return inverse, d_squares.where(squares.unsqueeze(1) > SQUARE_FLOOR, 0)
