"""The operators as their equations read. Every other implementation is compared with this one.

Shapes: w [B, N, H, D] (batch, tokens, heads, head width), temperature [H], mask [B, N], pi [B, N, H]; the bias comes
per token, [B, N, H] or [1, N, H]. Packed sequences are taken one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops._blocks import in_blocks, matrices, packed, products
from tost.ops._inputs import GatedInputs, GatedResults, Inputs, Sums, empty_sums
from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, SQUARE_FLOOR, statistics_dtype, zero_padding
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
    moment = (pi * products(v, form.block_size)).sum(dim=1, keepdim=True) / (mass + MASS_FLOOR)
    if form.block_size == 1:
        y = -pi * v / (1 + moment)
    else:
        blocks = matrices(moment, v.shape[-1], form.block_size)
        identity = torch.eye(form.block_size, dtype=v.dtype, device=v.device)
        solved, _ = torch.linalg.solve_ex(identity + blocks, in_blocks(-pi * v, form.block_size).unsqueeze(-1))
        y = solved.squeeze(-1).flatten(-2)
    return zero_padding(y, mask).to(w.dtype)


def causal_membership(inputs: Inputs) -> Tensor:
    """Return the memberships pi [B, N, H]; rows of real tokens sum to 1, rows of padding are 0."""
    if inputs.packing is not None:
        return _joined([causal_membership(alone) for alone in inputs.sequences()], inputs.w[..., 0])
    w, temperature, mask, bias, before, _ = inputs
    start = (empty_sums(w) if before is None else before).squares
    squares = zero_padding(w.to(statistics_dtype(w.dtype)), mask).square()
    share = squares / (start.unsqueeze(1) + prefix_sums(squares)).clamp_min(PREFIX_FLOOR)
    if bias is not None:
        share = share + bias.unsqueeze(-1)
    pi = (temperature.to(share.dtype) * share.sum(dim=-1)).softmax(dim=-1)
    return zero_padding(pi, mask)


def causal_tssa(inputs: Inputs) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    if inputs.packing is not None:
        results = [causal_tssa(alone) for alone in inputs.sequences()]
        sums = (torch.cat(each) for each in zip(empty_sums(inputs.w[:0]), *(x for _, x in results), strict=True))
        return _joined([y for y, _ in results], inputs.w), Sums(*sums)
    w, mask = inputs.w, inputs.mask
    before = empty_sums(w) if inputs.before is None else inputs.before
    weight = causal_membership(inputs).unsqueeze(-1)
    v = zero_padding(w.to(weight.dtype), mask)
    square, mass = v.square(), weight.squeeze(-1)
    masses = before.mass.unsqueeze(1) + prefix_sums(weight).squeeze(-1)
    moment = (before.weighted_squares.unsqueeze(1) + prefix_sums(weight * square)) / (masses + MASS_FLOOR).unsqueeze(-1)
    y = zero_padding(-weight * v / (1 + moment), mask).to(w.dtype)
    added = square.sum(dim=1), (weight * square).sum(dim=1), mass.sum(dim=1)
    return y, Sums(*(start + x for start, x in zip(before, added, strict=True)))


def gated_tssa(inputs: GatedInputs) -> GatedResults:
    """Return y, and mean and covariance after the last token."""
    g, (w, write), (mean, covariance) = inputs.block_size, inputs.zeroed(), inputs.start()
    if inputs.packing is not None:
        ys, means, covariances = zip(
            (w[:, :0], mean[:0], covariance[:0]), *map(gated_tssa, inputs.alone()), strict=True
        )
        return torch.cat(ys, dim=1), torch.cat(means), torch.cat(covariances)
    identity = torch.eye(g, dtype=w.dtype, device=w.device)
    mean, covariance = in_blocks(mean, g), matrices(covariance, w.shape[-1], g)
    steps = [w[:, :0]]
    for token, z in zip(in_blocks(w, g).unbind(1), write.unsqueeze(-1).unbind(1), strict=True):
        change = token - mean
        mean = mean + z * change
        outer = change.unsqueeze(-1) * change.unsqueeze(-2)
        covariance = (1 - z).unsqueeze(-1) * (covariance + z.unsqueeze(-1) * outer)
        solved, _ = torch.linalg.solve_ex(identity + covariance, (mean - token).unsqueeze(-1))
        steps.append(solved.squeeze(-1).flatten(-2).unsqueeze(1))
    return zero_padding(torch.cat(steps, dim=1), inputs.mask), mean.flatten(-2), packed(covariance)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Return sequences [1, n, ...] as one row; an empty one, like w, if there is none."""
    return torch.cat(parts, dim=1) if parts else torch.zeros_like(like)
