"""Both operators in PyTorch with a closed-form backward pass: any device, and transparent to ``torch.compile``.

Autograd through the reference keeps half a dozen tensors of the size of w. Here only w itself, the memberships and the
sums are kept; everything else is recomputed. The derivation is in ``ops/README.md``. The forward passes are plain
differentiable PyTorch, which is what other derivatives than these go through, here and for other backends.

Shapes: w, y [B, N, H, D], temperature, decay [H], bias, scale [B or 1, N, H], mask [B, N], pi [B, N, H]. Sums over all
tokens are [B, 1, H, D] or [B, 1, H], running sums [B, N, H, D], that of the mass [B, N, H, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost.ops._inputs import Inputs, Sums, empty_sums
from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, SQUARE_FLOOR, num_tokens, statistics_dtype, zero_padding
from tost.ops._scan import prefix_sums, real_tokens, running_sums
from tost.ops._transforms import gradients, is_transformed, wants_graph
from tost.ops.form import Form


def tssa(inputs: Inputs, form: Form) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w."""
    w, temperature, mask, *_ = inputs
    if is_transformed():
        return tssa_forward(w, temperature, mask, form).y
    y: Tensor = _TSSA.apply(w, temperature, mask, form)  # type: ignore[no-untyped-call]
    return y


def causal_tssa(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    w, temperature, mask, bias, before, scale, decay = inputs
    before = empty_sums(w) if before is None else before
    if is_transformed():
        y, _, *sums = causal_forward(w, temperature, bias, mask, scale, decay, form, *before)
    else:
        y, *sums = _CausalTSSA.apply(w, temperature, bias, mask, scale, decay, form, *before)  # type: ignore[no-untyped-call]
    return y, Sums(*sums)


def _scale(v: Tensor, temperature: Tensor, mask: Tensor | None, form: Form) -> Tensor:
    """Return what an energy is multiplied by to give a logit: the temperature, times n if scaled; [H] or [B, 1, H]."""
    temperature = temperature.to(v.dtype)
    return temperature * num_tokens(v, mask).to(v.dtype)[:, None, None] if form.count_scaled else temperature


class Forward(NamedTuple):
    """What the forward pass finds: y, the memberships, the sums (squares are None if nothing is normalized), the gain.

    `mass` is [B, 1, H] and floored, `squares`, `weighted` and `gain` are [B, 1, H, D].
    """

    y: Tensor
    pi: Tensor
    squares: Tensor | None
    weighted: Tensor
    mass: Tensor
    gain: Tensor


def tssa_forward(w: Tensor, temperature: Tensor, mask: Tensor | None, form: Form) -> Forward:
    """Run the operator; differentiable, but its intermediate results are then kept."""
    v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
    square, squares = v.square(), None
    if form.normalize:
        squares = square.sum(dim=1, keepdim=True)
        energy = (square / squares.clamp_min(SQUARE_FLOOR)).sum(dim=-1)
    else:
        energy = square.sum(dim=-1)
    pi = zero_padding((_scale(v, temperature, mask, form) * energy).softmax(dim=-1), mask)
    mass = pi.sum(dim=1, keepdim=True) + MASS_FLOOR
    weighted = (pi.unsqueeze(-1) * square).sum(dim=1, keepdim=True)
    gain = 1 / (1 + weighted / mass.unsqueeze(-1))
    return Forward((-pi.unsqueeze(-1) * v * gain).to(w.dtype), pi, squares, weighted, mass, gain)


def tssa_gradients(
    dy: Tensor, w: Tensor, temperature: Tensor, mask: Tensor | None, form: Form
) -> tuple[Tensor | None, ...]:
    """Return the gradients of w and temperature, differentiable."""
    return gradients(lambda w, t: tssa_forward(w, t, mask, form).y, (w, temperature), dy)


class _TSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, temperature: Tensor, mask: Tensor | None, form: Form) -> Tensor:
        y, pi, squares, _, mass, gain = tssa_forward(w, temperature, mask, form)
        ctx.form = form
        ctx.save_for_backward(w, temperature, mask, pi, squares, gain, mass)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w, temperature, mask, pi, squares, gain, mass = ctx.saved_tensors
        if wants_graph():
            return (*tssa_gradients(dy, w, temperature, mask, ctx.form), None, None)
        v, o = zero_padding(w.to(pi.dtype), mask), zero_padding(dy.to(pi.dtype), mask)
        square, weight = v.square(), pi.unsqueeze(-1)

        # moment = weighted / mass, gain = 1 / (1 + moment)
        d_weighted = gain.square() * (weight * o * v).sum(dim=1, keepdim=True) / mass.unsqueeze(-1)
        d_mass = -(d_weighted * (1 / gain - 1)).sum(dim=-1)
        d_pi = (v * (v * d_weighted - o * gain)).sum(dim=-1) + d_mass
        d_logit = pi * (d_pi - (pi * d_pi).sum(dim=-1, keepdim=True))
        d_energy = _scale(v, temperature, mask, ctx.form) * d_logit

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
        if ctx.form.count_scaled:
            energy = energy * num_tokens(v, mask)[:, None, None]
        d_temperature = (d_logit * energy).sum(dim=(0, 1))
        return dw.to(w.dtype), d_temperature.to(temperature.dtype), None, None


def _running(x: Tensor, start: Tensor, decay: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the sums of x [B, N, H, F] up to every token, after those at the start [B, H, F]."""
    return running_sums(x, start, decay, None if decay is None else real_tokens(x, mask))


def _last(x: Tensor, start: Tensor, running: Tensor, decay: Tensor | None) -> Tensor:
    """Return the sums after the last token."""
    if decay is None:
        return start + x.sum(dim=1)
    # Copied, so that a state that is kept does not keep the sums of every token.
    return running[:, -1].clone() if x.shape[1] else start


class _Reach(NamedTuple):
    """Gradient of one of the three sums."""

    upto: Tensor  # [B, N, H, F]
    start: Tensor  # [B, H, F]


def _reach(direct: Tensor, after: Tensor, decay: Tensor | None, mask: Tensor | None) -> _Reach:
    """A sum up to n reaches every output from n on: add up the `direct` gradients from n on, and that of the end."""
    if decay is None:
        # Reversing costs a copy; subtracting a prefix sum from the total would cancel digits at the end.
        suffix = prefix_sums(direct.flip(1)).flip(1)
        return _Reach(after.unsqueeze(1) + suffix, after + direct.sum(dim=1))
    if direct.shape[1] == 0:
        return _Reach(direct, after)
    # What a token hands to the one before it has faded by its own decay; padding hands on what it gets.
    tokens = real_tokens(direct, mask)
    faded = direct * decay.unsqueeze(-1)
    handed = running_sums(faded.flip(1), after, decay, tokens.flip(1)).flip(1)
    return _Reach(direct + torch.cat((handed[:, 1:], after.unsqueeze(1)), dim=1), handed[:, 0])


def _through_decay(
    reaches: Sequence[_Reach], sums: Sequence[Tensor], starts: Sequence[Tensor], mask: Tensor | None
) -> Tensor:
    """Return the gradient of the decay, [H]: that of each sum times the sum before the token, over the real tokens."""
    terms = []
    for reach, running, start in zip(reaches, sums, starts, strict=True):
        previous = torch.cat((start.unsqueeze(1), running), dim=1)[:, :-1]
        terms.append((reach.upto * previous).sum(dim=-1))
    return zero_padding(torch.stack(terms).sum(dim=0), mask).sum(dim=(0, 1))


def _energy(share: Tensor, bias: Tensor | None, scale: Tensor | None, width: int) -> Tensor:
    """Return the energies [B, N, H] from the tokens' shares; the bias counts once per feature."""
    energy = share if scale is None else share * scale
    return energy if bias is None else energy + width * bias


def causal_forward(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: Tensor | None,
    decay: Tensor | None,
    form: Form,
    *before: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, the memberships and the three sums after the last token; differentiable, as `tssa_forward` is."""
    v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
    square, starts = v.square(), (before[0], before[1], before[2].unsqueeze(-1))
    running = _running(square, starts[0], decay, mask)
    squares = _last(square, starts[0], running, decay)
    share = (square / running.clamp_min(PREFIX_FLOOR)).sum(dim=-1)
    del running  # as large as w
    energy = _energy(share, bias, scale, v.shape[-1])
    pi = zero_padding((temperature.to(v.dtype) * energy).softmax(dim=-1), mask)
    weight = pi.unsqueeze(-1)
    weighted, mass = _running(weight * square, starts[1], decay, mask), _running(weight, starts[2], decay, mask)
    y = -weight * v / (1 + weighted / (mass + MASS_FLOOR))
    weighted_squares = _last(weight * square, starts[1], weighted, decay)
    return y.to(w.dtype), pi, squares, weighted_squares, _last(weight, starts[2], mass, decay).squeeze(-1)


def causal_gradients(
    cotangents: tuple[Tensor, ...], inputs: tuple[Tensor | None, ...], mask: Tensor | None, form: Form
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, differentiable.

    Args:
        cotangents: Gradients of y and of the sums after the last token.
        inputs: w, temperature, bias, scale, decay and the sums before the first token.
        mask: Real tokens, ``[B, N]``.
        form: Options of the call.
    """

    def run(w: Tensor, temperature: Tensor, bias: Any, scale: Any, decay: Any, *before: Tensor) -> tuple[Tensor, ...]:
        y, _, *sums = causal_forward(w, temperature, bias, mask, scale, decay, form, *before)
        return (y, *sums)

    return gradients(run, inputs, cotangents)


class _CausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        temperature: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        scale: Tensor | None,
        decay: Tensor | None,
        form: Form,
        *before: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, pi, *sums = causal_forward(w, temperature, bias, mask, scale, decay, form, *before)
        ctx.form = form
        ctx.save_for_backward(w, temperature, bias, mask, scale, decay, pi, *before)
        return (y, *sums)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor, d_squares: Tensor, d_weighted: Tensor, d_mass: Tensor
    ) -> tuple[Tensor | None, ...]:
        w, temperature, bias, mask, scale, decay, pi, *before = ctx.saved_tensors
        if wants_graph():
            inputs, cotangents = (w, temperature, bias, scale, decay, *before), (dy, d_squares, d_weighted, d_mass)
            dw, dt, d_bias, d_scale, d_decay, *d_before = causal_gradients(cotangents, inputs, mask, ctx.form)
            return (dw, dt, d_bias, None, d_scale, d_decay, None, *d_before)
        v, o = zero_padding(w.to(pi.dtype), mask), zero_padding(dy.to(pi.dtype), mask)
        square, weight, starts = v.square(), pi.unsqueeze(-1), (before[0], before[1], before[2].unsqueeze(-1))
        weighted, mass = _running(weight * square, starts[1], decay, mask), _running(weight, starts[2], decay, mask)
        floored = mass + MASS_FLOOR
        gain = floored / (floored + weighted)

        direct = gain.square() * weight * o * v / floored
        to_mass = -(direct * weighted / floored).sum(dim=-1, keepdim=True)
        bar_weighted = _reach(direct, d_weighted, decay, mask)
        bar_mass = _reach(to_mass, d_mass.unsqueeze(-1), decay, mask)
        d_pi = (v * (v * bar_weighted.upto - o * gain)).sum(dim=-1) + bar_mass.upto.squeeze(-1)
        d_logit = pi * (d_pi - (pi * d_pi).sum(dim=-1, keepdim=True))
        d_energy = temperature.to(pi.dtype) * d_logit

        squares = _running(square, starts[0], decay, mask)
        inverse = 1 / squares.clamp_min(PREFIX_FLOOR)
        d_share = (d_energy if scale is None else d_energy * scale).unsqueeze(-1)
        direct = -d_share * square * inverse.square() * (squares > PREFIX_FLOOR)
        bar_squares = _reach(direct, d_squares, decay, mask)
        dw = 2 * v * (weight * bar_weighted.upto + d_share * inverse + bar_squares.upto) - weight * o * gain

        share, d_decay = (square * inverse).sum(dim=-1), None
        if decay is not None:
            d_decay = _through_decay((bar_squares, bar_weighted, bar_mass), (squares, weighted, mass), starts, mask)
        return (
            dw.to(w.dtype),
            (d_logit * _energy(share, bias, scale, v.shape[-1])).sum(dim=(0, 1)).to(temperature.dtype),
            None if bias is None else (v.shape[-1] * d_energy).sum_to_size(bias.shape),
            None,
            None if scale is None else (d_energy * share).sum_to_size(scale.shape),
            d_decay,
            None,
            bar_squares.start,
            bar_weighted.start,
            bar_mass.start.squeeze(-1),
        )
