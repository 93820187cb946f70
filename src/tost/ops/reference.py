"""Both operators as their equations read. Every other implementation is compared with this one.

Shapes: w [B, N, H, D] (batch, tokens, heads, head width), temperature [H], mask [B, N], pi [B, N, H]; bias and scale
come per token, [B, N, H] or [1, N, H], decays per head, [H], or per token, [B, N, H] or [B, N, H, K]. Packed sequences
are taken one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops._blocks import Layout, in_blocks, matrices, packed, products
from tost.ops._inputs import GatedInputs, GatedResults, Inputs, Sums, empty_sums, mass_columns, mass_of_columns
from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, SQUARE_FLOOR, num_tokens, statistics_dtype, zero_padding
from tost.ops._scan import prefix_sums
from tost.ops.form import Form


def membership(inputs: Inputs, form: Form) -> Tensor:
    """Return the memberships pi [B, N, H]; rows of real tokens sum to 1, rows of padding are 0."""
    if inputs.packing is not None:
        return _joined([membership(alone, form) for alone in inputs.sequences()], inputs.w[..., 0])
    w, temperature, mask, *_ = inputs
    dtype = statistics_dtype(w.dtype)
    squares = zero_padding(w.to(dtype), mask).square()
    if form.normalize:
        squares = squares / squares.sum(dim=1, keepdim=True).clamp_min(SQUARE_FLOOR)
    energy = squares.sum(dim=-1)
    if form.count_scaled:
        energy = energy * num_tokens(w, mask).to(dtype)[:, None, None]
    pi = (temperature.to(dtype) * energy).softmax(dim=-1)
    return zero_padding(pi, mask)


def tssa(inputs: Inputs, form: Form) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w; rows of padding are 0."""
    if inputs.packing is not None:
        return _joined([tssa(alone, form) for alone in inputs.sequences()], inputs.w)
    w, mask = inputs.w, inputs.mask
    pi = membership(inputs, form).unsqueeze(-1)
    v = zero_padding(w.to(pi.dtype), mask)
    mass = pi.sum(dim=1, keepdim=True)
    if form.centered:
        v = v - (pi * v).sum(dim=1, keepdim=True) / (mass + MASS_FLOOR)
    moment = (pi * products(v, form.block_size)).sum(dim=1, keepdim=True) / (mass + MASS_FLOOR)
    y = _shrunk(-pi * v, moment, form)
    return zero_padding(y, mask).to(w.dtype)


def causal_membership(inputs: Inputs, form: Form) -> Tensor:
    """Return the memberships pi [B, N, H]; rows of real tokens sum to 1, rows of padding are 0."""
    if inputs.packing is not None:
        return _joined([causal_membership(alone, form) for alone in inputs.sequences()], inputs.w[..., 0])
    return _causal_membership(inputs, form)[0]


def _causal_membership(inputs: Inputs, form: Form) -> tuple[Tensor, Tensor]:
    """Return the memberships, and the sum of squares after the last token."""
    w, temperature, mask, bias, before, scale, decay, _ = inputs
    start = (empty_sums(w, form) if before is None else before).squares
    D, layout = w.shape[-1], Layout(w.shape[-1], form, w.device)
    squares = zero_padding(w.to(statistics_dtype(w.dtype)), mask).square()
    summed = squares
    if form.counted:
        ones = zero_padding(squares.new_ones(*squares.shape[:3], layout.num_masses), mask)
        summed = torch.cat((squares, ones), dim=-1)
    prefix, after = _running(summed, start, decay, mask, layout, layout.squares)
    share = squares / prefix[..., :D].clamp_min(PREFIX_FLOOR)
    if form.counted:
        share = share * layout.spread(prefix[..., D:], layout.features)
    if scale is not None:
        share = share * scale.unsqueeze(-1)
    if bias is not None:
        share = share + bias.unsqueeze(-1)
    pi = (temperature.to(share.dtype) * share.sum(dim=-1)).softmax(dim=-1)
    return zero_padding(pi, mask), after


def causal_tssa(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    if inputs.packing is not None:
        results = [causal_tssa(alone, form) for alone in inputs.sequences()]
        none = empty_sums(inputs.w[:0], form)
        sums = (torch.cat(each) for each in zip(none, *(after for _, after in results), strict=True))
        return _joined([y for y, _ in results], inputs.w), Sums(*sums)
    w, mask, decay = inputs.w, inputs.mask, inputs.decay
    D, layout = w.shape[-1], Layout(w.shape[-1], form, w.device)
    before = empty_sums(w, form) if inputs.before is None else inputs.before
    pi, squares = _causal_membership(inputs, form)
    v, weight = zero_padding(w.to(pi.dtype), mask), pi.unsqueeze(-1)
    parts = products(v, form.block_size)
    if form.centered:
        parts = torch.cat((parts, v), dim=-1)
    weighted, weighted_after = _running(weight * parts, before.weighted_squares, decay, mask, layout, layout.weighted)
    weights, start = weight.expand(-1, -1, -1, layout.num_masses), mass_columns(before.mass, form)
    mass, mass_after = _running(weights, start, decay, mask, layout, None)
    moment = weighted / layout.spread(mass + MASS_FLOOR, layout.weighted)
    if form.centered:
        moment, mean = moment[..., :-D], moment[..., -D:]
        moment, v = moment - products(mean, form.block_size), v - mean
        if form.block_size == 1:
            moment = moment.clamp_min(0)
    y = _shrunk(-weight * v, moment, form)
    return zero_padding(y, mask).to(w.dtype), Sums(squares, weighted_after, mass_of_columns(mass_after, form))


def gated_tssa(inputs: GatedInputs) -> GatedResults:
    """Return mean and step of every token, and mean and covariance after the last one."""
    if inputs.packing is not None:
        results, (mean, covariance) = [gated_tssa(alone) for alone in inputs.alone()], inputs.start()
        means, steps = (_joined([each[i] for each in results], inputs.zeroed()[0]) for i in range(2))
        mean = torch.cat([mean[:0], *(each[2] for each in results)])
        return means, steps, mean, torch.cat([covariance[:0], *(each[3] for each in results)])
    g, (w, write), (mean, covariance) = inputs.block_size, inputs.zeroed(), inputs.start()
    identity = torch.eye(g, dtype=w.dtype, device=w.device)
    mean, covariance = in_blocks(mean, g), matrices(covariance, w.shape[-1], g)
    tokens, solutions = [w[:, :0]], [w[:, :0]]
    for token, z in zip(in_blocks(w, g).unbind(1), write.unsqueeze(-1).unbind(1), strict=True):
        change = token - mean
        mean = mean + z * change
        outer = change.unsqueeze(-1) * change.unsqueeze(-2)
        covariance = (1 - z).unsqueeze(-1) * (covariance + z.unsqueeze(-1) * outer)
        solved, _ = torch.linalg.solve_ex(identity + covariance, (token - mean).unsqueeze(-1))
        tokens.append(mean.flatten(-2).unsqueeze(1))
        solutions.append(solved.squeeze(-1).flatten(-2).unsqueeze(1))
    means, steps = (zero_padding(torch.cat(each, dim=1), inputs.mask) for each in (tokens, solutions))
    return means, steps, mean.flatten(-2), packed(covariance)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Return sequences [1, n, ...] as one row; an empty one, like w, if there is none."""
    return torch.cat(parts, dim=1) if parts else torch.zeros_like(like)


def _shrunk(v: Tensor, moment: Tensor, form: Form) -> Tensor:
    """Return v [B, N, H, D] over 1 + moment; in blocks, (I + S_b)^{-1} v_b."""
    if form.block_size == 1:
        return v / (1 + moment)
    blocks = matrices(moment, v.shape[-1], form.block_size)
    identity = torch.eye(form.block_size, dtype=v.dtype, device=v.device)
    solved: Tensor
    solved, _ = torch.linalg.solve_ex(identity + blocks, in_blocks(v, form.block_size).unsqueeze(-1))
    return solved.squeeze(-1).flatten(-2)


def _running(
    x: Tensor, before: Tensor, decay: Tensor | None, mask: Tensor | None, layout: Layout, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sums of x [B, N, H, F] up to every token, after those before [B, H, F], and after the last token."""
    if decay is None:
        return before.unsqueeze(1) + prefix_sums(x), before + x.sum(dim=1)
    if decay.dim() == 1:
        decay = decay.expand(x.shape[:3]) if mask is None else torch.where(mask.unsqueeze(-1), decay, 1)
    factors = decay.unsqueeze(-1) if decay.dim() == 3 else layout.spread(decay, places)
    total, totals = before, []
    for factor, own in zip(factors.unbind(1), x.unbind(1), strict=True):
        total = factor * total + own
        totals.append(total)
    return torch.stack(totals, dim=1) if totals else x, total
