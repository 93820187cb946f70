"""The operators in PyTorch with a closed-form backward pass: any device, and transparent to ``torch.compile``.

Autograd through the reference keeps half a dozen tensors of the size of w. Here only w itself, the memberships and the
sums are kept; everything else is recomputed. The derivation is in ``ops/README.md``. The forward passes are plain
differentiable PyTorch, which is what other derivatives than these go through, here and for other backends.

Shapes: w, y [B, N, H, D], temperature [H], bias [B or 1, N, H], mask [B, N], pi [B, N, H]. Sums over all tokens are
[B, 1, H, D] or [B, 1, H], running sums [B, N, H, D] and [B, N, H]. Statistics in blocks, and gated ones, are replayed
in the backward pass, as checkpointed layers are; products of features are packed as in ``_blocks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tost.ops._blocks import products, shrink, sum_products
from tost.ops._inputs import GatedInputs, GatedResults, Inputs, Sums, empty_sums
from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, SQUARE_FLOOR, statistics_dtype, zero_padding
from tost.ops._scan import linear_recurrence, prefix_sums
from tost.ops._transforms import gradients, is_transformed, wants_graph
from tost.ops.form import Form
from tost.ops.packing import Group, Packing, put_tokens


def tssa(inputs: Inputs, form: Form) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w."""
    return tssa_formulas(inputs, form) if is_transformed() else _tssa(_TSSA.apply, inputs, form)


def causal_tssa(inputs: Inputs) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    return causal_formulas(inputs) if is_transformed() else _causal_tssa(_CausalTSSA.apply, inputs)


def tssa_formulas(inputs: Inputs, form: Form) -> Tensor:
    """Run `tssa` in plain differentiable PyTorch, which keeps its intermediate results."""
    return _tssa(lambda *arguments: tssa_forward(*arguments).y, inputs, form)


def causal_formulas(inputs: Inputs) -> tuple[Tensor, Sums]:
    """Run `causal_tssa` in plain differentiable PyTorch, which keeps its intermediate results."""
    return _causal_tssa(lambda *arguments: causal_forward(*arguments)[1:], inputs)


def _tssa(plain: Callable[..., Any], inputs: Inputs, form: Form) -> Tensor:
    """Run the operator, without blocks by `plain`."""
    if inputs.packing is not None:
        return _in_groups(lambda group: (_tssa(plain, group, form), ()), inputs)[0]
    if form.block_size > 1:
        return block_tssa(inputs, form)
    y: Tensor = plain(form, inputs.mask, inputs.w, inputs.temperature)
    return y


def _causal_tssa(plain: Callable[..., Any], inputs: Inputs) -> tuple[Tensor, Sums]:
    if inputs.packing is not None:
        y, *sums = _in_groups(lambda group: _causal_tssa(plain, group), inputs)
        return y, Sums(*sums) if sums else empty_sums(inputs.w[:0])
    w, temperature, mask, bias, before, _ = inputs
    y, *sums = plain(mask, w, temperature, bias, *(empty_sums(w) if before is None else before))
    return y, Sums(*sums)


def _in_groups(run: Callable[[Inputs], tuple[Tensor, Sequence[Tensor]]], inputs: Inputs) -> tuple[Tensor, ...]:
    """Run packed sequences in a few padded batches; return y in one row and the sums of all sequences."""
    packing = inputs.packing
    assert packing is not None
    groups = list(packing.groups())
    if not groups:
        return (torch.zeros_like(inputs.w),)
    outputs, sums = zip(*(run(_group_inputs(inputs, group)) for group in groups), strict=True)
    back = torch.cat([group.sequences for group in groups]).argsort()
    y = put_tokens(outputs, groups, inputs.w)
    return y, *(torch.cat(each).index_select(0, back) for each in zip(*sums, strict=True))


def _group_inputs(inputs: Inputs, group: Group) -> Inputs:
    """Return the inputs of a group of packed sequences, as a padded batch."""
    bias = None if inputs.bias is None else group.take(inputs.bias)
    before = inputs.before
    if before is not None:
        before = Sums(*(x.index_select(0, group.sequences) for x in before))
    return Inputs(group.take(inputs.w), inputs.temperature, group.mask(inputs.mask), bias, before)


def _replayed(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Run a differentiable function. The backward pass runs it again, in place of keeping its intermediate results."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def _memberships(square: Tensor, temperature: Tensor, mask: Tensor | None, squares: Tensor | None) -> Tensor:
    """Return pi [B, N, H] in sequences with these sums of squares; None leaves energies unnormalized."""
    share = square if squares is None else square / squares.clamp_min(SQUARE_FLOOR)
    return zero_padding((temperature.to(square.dtype) * share.sum(dim=-1)).softmax(dim=-1), mask)


def _through_logits(pi: Tensor, d_pi: Tensor) -> Tensor:
    return pi * (d_pi - (pi * d_pi).sum(dim=-1, keepdim=True))


class _Through(NamedTuple):
    """Gradients that flow through memberships. The gradient of the tokens is 2 v times the sum of the `terms`."""

    terms: list[Tensor]
    temperature: Tensor


def _through_memberships(square: Tensor, temperature: Tensor, squares: Tensor | None, d_logit: Tensor) -> _Through:
    d_energy = temperature.to(square.dtype) * d_logit
    if squares is None:
        energy, terms = square.sum(dim=-1), [d_energy.unsqueeze(-1)]
    else:
        inverse = 1 / squares.clamp_min(SQUARE_FLOOR)
        energy = (square * inverse).sum(dim=-1)
        # Multiplied one by one: the square of the inverse may leave float32.
        d_squares = -inverse * (inverse * (square * d_energy.unsqueeze(-1)).sum(dim=1, keepdim=True))
        terms = [inverse * d_energy.unsqueeze(-1), d_squares.where(squares > SQUARE_FLOOR, 0)]
    return _Through(terms, (d_logit * energy).sum(dim=(0, 1)).to(temperature.dtype))


class Forward(NamedTuple):
    """Results of the forward pass: `mass` [B, 1, H] is floored, `squares` are None without normalization."""

    y: Tensor
    pi: Tensor
    squares: Tensor | None
    weighted: Tensor
    mass: Tensor


def tssa_forward(form: Form, mask: Tensor | None, w: Tensor, temperature: Tensor) -> Forward:
    """Run the plain operator; differentiable, but its intermediate results are then kept."""
    v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
    square = v.square()
    squares = square.sum(dim=1, keepdim=True) if form.normalize else None
    pi = _memberships(square, temperature, mask, squares)
    mass = pi.sum(dim=1, keepdim=True) + MASS_FLOOR
    weighted = (pi.unsqueeze(-1) * square).sum(dim=1, keepdim=True)
    y = -pi.unsqueeze(-1) * v * _gain(weighted, mass)
    return Forward(y.to(w.dtype), pi, squares, weighted, mass)


def _gain(weighted: Tensor, mass: Tensor) -> Tensor:
    return 1 / (1 + weighted / mass.unsqueeze(-1))


def tssa_gradients(
    dy: Tensor, w: Tensor, temperature: Tensor, mask: Tensor | None, form: Form, packing: Packing | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of w and temperature, differentiable."""
    return gradients(lambda w, t: tssa_formulas(Inputs(w, t, mask, packing=packing), form), (w, temperature), dy)


class _TSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, mask: Tensor | None, w: Tensor, temperature: Tensor) -> Tensor:
        y, *saved = tssa_forward(form, mask, w, temperature)
        ctx.form = form
        ctx.save_for_backward(w, temperature, mask, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w, temperature, mask, pi, squares, weighted, mass = ctx.saved_tensors
        if wants_graph():
            return None, None, *tssa_gradients(dy, w, temperature, mask, ctx.form)
        gain = _gain(weighted, mass)
        v, o = zero_padding(w.to(pi.dtype), mask), zero_padding(dy.to(pi.dtype), mask)
        square, weight = v.square(), pi.unsqueeze(-1)

        # moment = weighted / mass, gain = 1 / (1 + moment)
        d_weighted = gain.square() * (weight * o * v).sum(dim=1, keepdim=True) / mass.unsqueeze(-1)
        d_mass = -(d_weighted * (1 / gain - 1)).sum(dim=-1)
        d_pi = (v * (v * d_weighted - o * gain)).sum(dim=-1) + d_mass
        through = _through_memberships(square, temperature, squares, _through_logits(pi, d_pi))
        dw = 2 * v * sum(through.terms, weight * d_weighted) - weight * o * gain
        return None, None, dw.to(w.dtype), through.temperature


def _running(x: Tensor, start: Tensor) -> Tensor:
    """Return the sums up to every token of x [B, N, ...], after `start` [B, ...]."""
    sums = prefix_sums(x) if x.dim() == 4 else prefix_sums(x.unsqueeze(-1)).squeeze(-1)
    return start.unsqueeze(1) + sums


class _Reach(NamedTuple):
    """Gradient of one of the three sums, up to every token and before the first."""

    upto: Tensor
    start: Tensor


def _reach(direct: Tensor, after: Tensor) -> _Reach:
    """Add up the `direct` gradients from every token on, and the gradient `after` the last token."""
    # Reversing costs a copy; subtracting a prefix sum from the total would cancel digits at the end.
    suffix = _running(direct.flip(1), after).flip(1)
    return _Reach(suffix, after + direct.sum(dim=1))


def _energy(square: Tensor, prefix: Tensor, bias: Tensor | None) -> Tensor:
    """Return the energies [B, N, H]; the bias counts once per feature."""
    share = (square / prefix.clamp_min(PREFIX_FLOOR)).sum(dim=-1)
    return share if bias is None else share + square.shape[-1] * bias


def causal_forward(
    mask: Tensor | None, w: Tensor, temperature: Tensor, bias: Tensor | None, *before: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the memberships, y and the three sums after the last token; differentiable, as `tssa_forward` is."""
    v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
    square, (squares, weighted, mass) = v.square(), before
    energy = _energy(square, _running(square, squares), bias)
    pi = zero_padding((temperature.to(v.dtype) * energy).softmax(dim=-1), mask)
    added, weight = pi.unsqueeze(-1) * square, pi.unsqueeze(-1)
    masses = _running(pi, mass).unsqueeze(-1)
    y = -weight * v / (1 + _running(added, weighted) / (masses + MASS_FLOOR))
    after = squares + square.sum(dim=1), weighted + added.sum(dim=1), mass + pi.sum(dim=1)
    return pi, y.to(w.dtype), *after


def causal_gradients(
    cotangents: tuple[Tensor, ...],
    inputs: tuple[Tensor | None, ...],
    mask: Tensor | None,
    packing: Packing | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, differentiable.

    Args:
        cotangents: Gradients of y and of the sums after the last token.
        inputs: w, temperature, bias and the sums before the first token.
        mask: Real tokens, ``[B, N]``.
        packing: Where the sequences of the row begin; None if each row is one.
    """

    def run(w: Tensor, temperature: Tensor, bias: Any, *before: Tensor) -> tuple[Tensor, ...]:
        y, sums = causal_formulas(Inputs(w, temperature, mask, bias, Sums(*before), packing))
        return (y, *sums)

    return gradients(run, inputs, cotangents)


class _CausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor | None, *tensors: Any) -> tuple[Tensor, ...]:
        pi, *outputs = causal_forward(mask, *tensors)
        ctx.save_for_backward(mask, pi, *tensors)
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor, d_squares: Tensor, d_weighted: Tensor, d_mass: Tensor
    ) -> tuple[Tensor | None, ...]:
        mask, pi, *tensors = ctx.saved_tensors
        if wants_graph():
            return None, *causal_gradients((dy, d_squares, d_weighted, d_mass), tuple(tensors), mask)
        w, temperature, bias, *before = tensors
        v, o = zero_padding(w.to(pi.dtype), mask), zero_padding(dy.to(pi.dtype), mask)
        square, weight = v.square(), pi.unsqueeze(-1)
        weighted = _running(weight * square, before[1])
        floored = _running(pi, before[2]).unsqueeze(-1) + MASS_FLOOR
        gain = floored / (floored + weighted)

        direct = gain.square() * weight * o * v / floored
        to_mass = -(direct * weighted / floored).sum(dim=-1)
        bar_weighted, bar_mass = _reach(direct, d_weighted), _reach(to_mass, d_mass)
        d_pi = (v * (v * bar_weighted.upto - o * gain)).sum(dim=-1) + bar_mass.upto
        d_logit = _through_logits(pi, d_pi)
        d_energy = temperature.to(v.dtype) * d_logit
        prefix = _running(square, before[0])
        inverse, d_share = 1 / prefix.clamp_min(PREFIX_FLOOR), d_energy.unsqueeze(-1)
        bar_squares = _reach(-d_share * square * inverse.square() * (prefix > PREFIX_FLOOR), d_squares)
        dw = 2 * v * (d_share * inverse + bar_squares.upto + weight * bar_weighted.upto) - weight * o * gain
        d_temperature = (d_logit * _energy(square, prefix, bias)).sum(dim=(0, 1)).to(temperature.dtype)
        d_bias = None if bias is None else (v.shape[-1] * d_energy).sum_to_size(bias.shape)
        return None, dw.to(w.dtype), d_temperature, d_bias, bar_squares.start, bar_weighted.start, bar_mass.start


# --- Gated statistics

_GATED_CHUNK = 256  # tokens whose covariances are in memory at the same time


def gated_tssa(inputs: GatedInputs) -> GatedResults:
    """Return y, and mean and covariance after the last token."""
    if inputs.packing is not None:
        return _gated_groups(inputs, inputs.packing)
    g, (w, write), (mean, covariance) = inputs.block_size, inputs.zeroed(), inputs.start()
    outputs = [w[:, :0]]
    whole = torch.compiler.is_exporting()  # the number of pieces would fix the length
    for rows in [slice(None)] if whole else [slice(n, n + _GATED_CHUNK) for n in range(0, w.shape[1], _GATED_CHUNK)]:
        y, mean, covariance = _replayed(partial(_gated_chunk, g), w[:, rows], write[:, rows], mean, covariance)
        outputs.append(y)
    return zero_padding(torch.cat(outputs, dim=1), inputs.mask), mean, covariance


def _gated_chunk(block_size: int, w: Tensor, write: Tensor, mean: Tensor, covariance: Tensor) -> GatedResults:
    D = w.shape[3]
    blocks = torch.arange(D // block_size, device=w.device)
    of_features = blocks.repeat_interleave(block_size)
    of_products = torch.cat([blocks.repeat_interleave(block_size - k) for k in range(block_size)])
    keep, z = 1 - write, write.index_select(-1, of_features)
    a = keep.index_select(-1, of_features)
    means = linear_recurrence(a.flatten(2), (z * w).flatten(2), mean.flatten(1)).reshape(w.shape)
    change = w - torch.cat((mean.unsqueeze(1), means), dim=1)[:, :-1]
    added = (write * keep).index_select(-1, of_products) * products(change, block_size)
    fading = keep.index_select(-1, of_products)
    covariances = linear_recurrence(fading.flatten(2), added.flatten(2), covariance.flatten(1))
    covariances = covariances.reshape(*w.shape[:3], -1)
    # Copied: a view would keep the statistics of the whole chunk.
    return shrink(-a * change, covariances, block_size), means[:, -1].clone(), covariances[:, -1].clone()


def _gated_groups(inputs: GatedInputs, packing: Packing) -> GatedResults:
    """Run packed sequences in a few padded batches."""
    groups, (mean, covariance) = list(packing.groups()), inputs.start()
    results = [
        gated_tssa(
            GatedInputs(
                w=group.take(inputs.w),
                write=group.take(inputs.write),
                mask=group.mask(inputs.mask),
                mean=mean.index_select(0, group.sequences),
                covariance=covariance.index_select(0, group.sequences),
            )
        )
        for group in groups
    ]
    if not results:
        return inputs.zeroed()[0], mean, covariance
    back = torch.cat([group.sequences for group in groups]).argsort()
    outputs, *states = zip(*results, strict=True)
    mean, covariance = (torch.cat(each).index_select(0, back) for each in states)
    return put_tokens(outputs, groups, inputs.w), mean, covariance


# --- Statistics in blocks


def block_tssa(inputs: Inputs, form: Form, reduce: Callable[[Tensor], Tensor] = lambda total: total) -> Tensor:
    """Run `tssa` with statistics in blocks.

    Args:
        inputs: The tensors; those of this process where sequences are shared.
        form: Options of the call.
        reduce: Adds a sum over these tokens to those of the other processes; differentiable.
    """
    w, temperature, mask, *_ = inputs
    squares, g = None, form.block_size
    # Widened once: gradients of the pieces below add up before they are rounded to the dtype of w.
    v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
    if form.normalize:
        squares = reduce(_replayed(lambda v: v.square().sum(dim=1, keepdim=True), v))
    pi = _replayed(lambda v, t, squares: _memberships(v.square(), t, mask, squares), v, temperature, squares)
    moment = _group_moments(v, pi, g, reduce)
    y: Tensor = _replayed(lambda v, pi, moment: (-pi.unsqueeze(-1) * shrink(v, moment, g)).to(w.dtype), v, pi, moment)
    return y


def _group_moments(v: Tensor, pi: Tensor, block_size: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    def sums(v: Tensor, pi: Tensor) -> Tensor:
        weight = pi.unsqueeze(-1)
        return torch.cat((sum_products(weight * v, v, block_size), weight.sum(dim=1)), dim=-1)

    total = reduce(_replayed(sums, v, pi)).unsqueeze(1)
    return total[..., :-1] / (total[..., -1:] + MASS_FLOOR)
