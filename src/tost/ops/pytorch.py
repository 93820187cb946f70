"""Both operators in PyTorch with a closed-form backward pass: any device, and transparent to ``torch.compile``.

Autograd through the reference keeps half a dozen tensors of the size of w. Here only w itself, the memberships and the
sums are kept; everything else is recomputed. The derivation is in ``ops/README.md``. The forward passes are plain
differentiable PyTorch, which is what other derivatives than these go through, here and for other backends.

Shapes: w, y [B, N, H, D], temperature [H], decay [H], [B, N, H] or [B, N, H, K], bias, scale [B or 1, N, H], mask
[B, N], pi [B, N, H]. Sums over all tokens are [B, 1, H, D] or [B, 1, H], running sums [B, N, H, D], that of the mass
[B, N, H, K], where K = 1 unless decays differ between channels; see `Layout`.

With statistics in blocks, or about a mean, the formulas are replayed in the backward pass, as checkpointed layers are.
Products of features are packed as in ``_blocks.py``, P = D(g+1)/2 of them per head, and with means the D weighted
tokens follow. The causal form walks through the tokens in chunks, so that no temporary has P numbers for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tost.ops._blocks import Layout, Shrinkage, products, sum_products
from tost.ops._inputs import (
    GatedInputs,
    GatedResults,
    Inputs,
    Sums,
    empty_sums,
    mass_columns,
    mass_of_columns,
    one_for_padding,
)
from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, SQUARE_FLOOR, num_tokens, statistics_dtype, zero_padding
from tost.ops._scan import Fading, Powers, Products, linear_recurrence, prefix_sums, real_tokens, running_sums
from tost.ops._transforms import gradients, is_transformed, wants_graph
from tost.ops.form import Form
from tost.ops.packing import Group, Packing, put_tokens


def tssa(inputs: Inputs, form: Form) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w."""
    return tssa_formulas(inputs, form) if is_transformed() else _tssa(_TSSA.apply, inputs, form)


def causal_tssa(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    return causal_formulas(inputs, form) if is_transformed() else _causal_tssa(_CausalTSSA.apply, inputs, form)


def tssa_formulas(inputs: Inputs, form: Form) -> Tensor:
    """Run `tssa` in plain differentiable PyTorch, which keeps its intermediate results."""
    return _tssa(lambda *arguments: tssa_forward(*arguments).y, inputs, form)


def causal_formulas(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Run `causal_tssa` in plain differentiable PyTorch, which keeps its intermediate results."""
    return _causal_tssa(lambda *arguments: causal_forward(*arguments)[1:], inputs, form)


def _tssa(plain: Callable[..., Any], inputs: Inputs, form: Form) -> Tensor:
    """Run the operator, without blocks and means by `plain`."""
    if inputs.packing is not None:
        return _in_groups(lambda group: (_tssa(plain, group, form), ()), inputs)[0]
    if form.block_size > 1 or form.centered:
        return block_tssa(inputs, form)
    y: Tensor = plain(form, inputs.mask, inputs.w, inputs.temperature)
    return y


def _causal_tssa(plain: Callable[..., Any], inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Run the causal operator, without blocks and means by `plain`."""
    if inputs.packing is not None:
        y, *sums = _in_groups(lambda group: _causal_tssa(plain, group, form), inputs)
        return y, Sums(*sums) if sums else empty_sums(inputs.w[:0], form)
    w, temperature, mask, bias, before, scale, decay, _ = inputs
    run = _causal_block_tssa if form.block_size > 1 or form.centered else plain
    before = empty_sums(w, form) if before is None else before
    y, *sums = run(form, mask, w, temperature, bias, scale, decay, *before)
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
    bias, scale = (None if x is None else group.take(x) for x in (inputs.bias, inputs.scale))
    before = inputs.before
    if before is not None:
        before = Sums(*(x.index_select(0, group.sequences) for x in before))
    w, mask, decay = group.take(inputs.w), group.mask(inputs.mask), inputs.decay
    if decay is not None and decay.dim() > 1:
        decay = one_for_padding(group.take(decay), mask)
    return Inputs(w, inputs.temperature, mask, bias, before, scale, decay)


_Reduce = Callable[[Tensor], Tensor]


def _alone(total: Tensor) -> Tensor:
    return total


def _replayed(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Run a differentiable function. The backward pass runs it again, in place of keeping its intermediate results."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def _memberships(
    v: Tensor,
    square: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    form: Form,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return pi [B, N, H] of the tokens v; the sums of their squares and their count, where these are used."""
    squares = square.sum(dim=1, keepdim=True) if form.normalize else None
    count = num_tokens(v, mask).to(v.dtype)[:, None, None] if form.count_scaled else None
    return _memberships_in(square, temperature, mask, squares, count), squares, count


def _memberships_in(
    square: Tensor, temperature: Tensor, mask: Tensor | None, squares: Tensor | None, count: Tensor | None
) -> Tensor:
    """Return pi [B, N, H] in sequences with the given sums of squares and counts."""
    scale = temperature.to(square.dtype)
    scale = scale if count is None else scale * count
    share = square if squares is None else square / squares.clamp_min(SQUARE_FLOOR)
    return zero_padding((scale * share.sum(dim=-1)).softmax(dim=-1), mask)


def _through_logits(pi: Tensor, d_pi: Tensor) -> Tensor:
    return pi * (d_pi - (pi * d_pi).sum(dim=-1, keepdim=True))


class _Through(NamedTuple):
    """Gradients that flow through memberships. That of the tokens is 2 v times the sum of the `terms`."""

    terms: list[Tensor]
    temperature: Tensor


def _through_memberships(
    square: Tensor,
    temperature: Tensor,
    squares: Tensor | None,
    count: Tensor | None,
    d_logit: Tensor,
) -> _Through:
    scale = temperature.to(square.dtype)
    d_energy = (scale if count is None else scale * count) * d_logit
    if squares is None:
        energy, terms = square.sum(dim=-1), [d_energy.unsqueeze(-1)]
    else:
        inverse = 1 / squares.clamp_min(SQUARE_FLOOR)
        energy = (square * inverse).sum(dim=-1)
        # Multiplied one by one: the square of the inverse may leave float32.
        d_squares = -inverse * (inverse * (square * d_energy.unsqueeze(-1)).sum(dim=1, keepdim=True))
        terms = [inverse * d_energy.unsqueeze(-1), d_squares.where(squares > SQUARE_FLOOR, 0)]
    if count is not None:
        energy = energy * count
    return _Through(terms, (d_logit * energy).sum(dim=(0, 1)).to(temperature.dtype))


class Forward(NamedTuple):
    """What the forward pass finds: y, the memberships, the sums and the number of tokens. What is not used is None.

    `mass` is [B, 1, H] and floored, `tokens` [B, 1, 1], `squares` [B, 1, H, D], `weighted` [B, 1, H, D], or P for D.
    """

    y: Tensor
    pi: Tensor
    squares: Tensor | None
    tokens: Tensor | None
    weighted: Tensor
    mass: Tensor


def tssa_forward(form: Form, mask: Tensor | None, w: Tensor, temperature: Tensor) -> Forward:
    """Run the plain operator; differentiable, but its intermediate results are then kept."""
    v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
    square = v.square()
    pi, squares, count = _memberships(v, square, temperature, mask, form)
    mass = pi.sum(dim=1, keepdim=True) + MASS_FLOOR
    weighted = (pi.unsqueeze(-1) * square).sum(dim=1, keepdim=True)
    y = -pi.unsqueeze(-1) * v * _gain(weighted, mass)
    return Forward(y.to(w.dtype), pi, squares, count, weighted, mass)


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
        w, temperature, mask, pi, squares, count, weighted, mass = ctx.saved_tensors
        if wants_graph():
            return None, None, *tssa_gradients(dy, w, temperature, mask, ctx.form)
        gain = _gain(weighted, mass)
        v, o = zero_padding(w.to(pi.dtype), mask), zero_padding(dy.to(pi.dtype), mask)
        square, weight = v.square(), pi.unsqueeze(-1)

        # moment = weighted / mass, gain = 1 / (1 + moment)
        d_weighted = gain.square() * (weight * o * v).sum(dim=1, keepdim=True) / mass.unsqueeze(-1)
        d_mass = -(d_weighted * (1 / gain - 1)).sum(dim=-1)
        d_pi = (v * (v * d_weighted - o * gain)).sum(dim=-1) + d_mass
        through = _through_memberships(square, temperature, squares, count, _through_logits(pi, d_pi))
        dw = 2 * v * sum(through.terms, weight * d_weighted) - weight * o * gain
        return None, None, dw.to(w.dtype), through.temperature


class _Fadings(NamedTuple):
    """How each of the three sums fades; None for not at all."""

    squares: Fading | None
    weighted: Fading | None
    mass: Fading | None

    @classmethod
    def of(cls, decay: Tensor | None, mask: Tensor | None, w: Tensor, layout: Layout) -> _Fadings:
        """Return those of a decay for the tokens w [B, N, ...]."""
        if decay is None:
            return cls(None, None, None)
        if decay.dim() == 1:
            shared = Powers(decay, real_tokens(w, mask))
            return cls(shared, shared, shared)
        columns = decay.unsqueeze(-1) if decay.dim() == 3 else decay
        return cls(*(Products(layout.spread(columns, places)) for places in (layout.squares, layout.weighted, None)))


def _last(x: Tensor, start: Tensor, running: Tensor, fading: Fading | None) -> Tensor:
    """Return the sums after the last token."""
    if fading is None:
        return start + x.sum(dim=1)
    # Copied, so that a state that is kept does not keep the sums of every token.
    return running[:, -1].clone() if x.shape[1] else start


class _Reach(NamedTuple):
    """Gradient of one of the three sums."""

    upto: Tensor  # [B, N, H, F]
    start: Tensor  # [B, H, F]


def _reach(direct: Tensor, after: Tensor, fading: Fading | None) -> _Reach:
    """A sum up to n reaches every output from n on: add up the `direct` gradients from n on, and that of the end."""
    if fading is None:
        # Reversing costs a copy; subtracting a prefix sum from the total would cancel digits at the end.
        suffix = prefix_sums(direct.flip(1)).flip(1)
        return _Reach(after.unsqueeze(1) + suffix, after + direct.sum(dim=1))
    if direct.shape[1] == 0:
        return _Reach(direct, after)
    # What a token hands to the one before it has faded by its own decay; padding hands on what it gets.
    faded = direct * fading.of_real()
    handed = running_sums(faded.flip(1), after, fading.flip()).flip(1)
    return _Reach(direct + torch.cat((handed[:, 1:], after.unsqueeze(1)), dim=1), handed[:, 0])


def _through_decay(decay: Tensor, mask: Tensor | None, layout: Layout, *sums: _Faded) -> Tensor:
    """Return the gradient of the decay: that of each sum times the sum before the token, over the real tokens."""
    terms = []
    for reach, running, start, places in sums:
        previous = torch.cat((start.unsqueeze(1), running), dim=1)[:, :-1]
        terms.append(
            (reach.upto * previous).sum(dim=-1) if decay.dim() < 4 else layout.collect(reach.upto * previous, places)
        )
    gradient = zero_padding(torch.stack(terms).sum(dim=0), mask)
    return gradient.sum(dim=(0, 1)) if decay.dim() == 1 else gradient


class _Faded(NamedTuple):
    """A running sum with its gradient, for that of the decay."""

    reach: _Reach
    running: Tensor
    start: Tensor
    places: Tensor | None = None


def _energy(share: Tensor, bias: Tensor | None, scale: Tensor | None, width: int) -> Tensor:
    """Return the energies [B, N, H] from the tokens' shares; the bias counts once per feature."""
    energy = share if scale is None else share * scale
    return energy if bias is None else energy + width * bias


class _CausalThrough(NamedTuple):
    """As `_Through`, in the causal form."""

    terms: list[Tensor]
    temperature: Tensor
    bias: Tensor | None
    scale: Tensor | None
    squares: _Faded  # the running sums of squares


def summed_squares(square: Tensor, mask: Tensor | None, layout: Layout, form: Form) -> Tensor:
    """Return what is summed up for the energies: squares [B, N, H, D], and 1 for every real token where it counts."""
    if not form.counted:
        return square
    ones = zero_padding(square.new_ones(*square.shape[:3], layout.num_masses), mask)
    return torch.cat((square, ones), dim=-1)


_CausalTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, *tuple[Tensor, ...]]
"""w, temperature, bias, scale, decay and the sums before the first token: what has a gradient, in this order."""


class _Energies(NamedTuple):
    """What memberships are found from in the causal form; `start` is the sum of squares before the first token."""

    form: Form
    layout: Layout
    mask: Tensor | None
    v: Tensor
    square: Tensor
    temperature: Tensor
    bias: Tensor | None
    scale: Tensor | None
    fadings: _Fadings
    start: Tensor

    @classmethod
    def of(cls, form: Form, mask: Tensor | None, *tensors: *_CausalTensors) -> _Energies:
        """Return those of a call."""
        w, temperature, bias, scale, decay, start, *_ = tensors
        v, layout = zero_padding(w.to(statistics_dtype(w.dtype)), mask), Layout(w.shape[-1], form, w.device)
        fadings = _Fadings.of(decay, mask, w, layout)
        return cls(form, layout, mask, v, v.square(), temperature, bias, scale, fadings, start)

    def memberships(self) -> tuple[Tensor, Tensor]:
        """Return pi [B, N, H] and the sums of squares after the last token."""
        form, layout, mask, _, square, temperature, bias, scale, (fading, *_), start = self
        width, summed = square.shape[-1], summed_squares(square, mask, layout, form)
        running = running_sums(summed, start, fading)
        squares = _last(summed, start, running, fading)
        share = square / running[..., :width].clamp_min(PREFIX_FLOOR)
        if form.counted:
            share = share * layout.spread(running[..., width:], layout.features)
        share = share.sum(dim=-1)
        del running  # as large as w
        energy = _energy(share, bias, scale, width)
        return zero_padding((temperature.to(square.dtype) * energy).softmax(dim=-1), mask), squares

    def through(self, d_squares: Tensor, d_logit: Tensor) -> _CausalThrough:
        """Return the gradients, given those of the last sums of squares and of what the softmax is taken of."""
        form, layout, mask, _, square, temperature, bias, scale, (fading, *_), start = self
        width, d_energy = square.shape[-1], temperature.to(square.dtype) * d_logit
        squares = running = running_sums(summed_squares(square, mask, layout, form), start, fading)
        if form.counted:
            squares, count = running[..., :width], running[..., width:]
        inverse = 1 / squares.clamp_min(PREFIX_FLOOR)
        d_share = (d_energy if scale is None else d_energy * scale).unsqueeze(-1)
        share = square * inverse
        if form.counted:
            d_count = layout.collect(d_share * share, layout.features)
            count = layout.spread(count, layout.features)
            share, d_share = share * count, d_share * count
        direct = -d_share * square * inverse.square() * (squares > PREFIX_FLOOR)
        if form.counted:
            direct = torch.cat((direct, d_count), dim=-1)
        reach = _reach(direct, d_squares, fading)
        share = share.sum(dim=-1)
        return _CausalThrough(
            [d_share * inverse, reach.upto[..., :width] if form.counted else reach.upto],
            (d_logit * _energy(share, bias, scale, width)).sum(dim=(0, 1)).to(temperature.dtype),
            None if bias is None else (width * d_energy).sum_to_size(bias.shape),
            None if scale is None else (d_energy * share).sum_to_size(scale.shape),
            _Faded(reach, running, start, layout.squares),
        )


def causal_forward(
    form: Form, mask: Tensor | None, *tensors: *_CausalTensors
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the memberships, y and the three sums after the last token; differentiable, as `tssa_forward` is."""
    w, _, _, _, _, _, *before = tensors
    energies = _Energies.of(form, mask, *tensors)
    pi, squares = energies.memberships()
    square, fadings = energies.square, energies.fadings
    weight, weights = pi.unsqueeze(-1), pi.unsqueeze(-1).expand(-1, -1, -1, energies.layout.num_masses)
    starts = (before[0], mass_columns(before[1], form))
    weighted = running_sums(weight * square, starts[0], fadings.weighted)
    mass = running_sums(weights, starts[1], fadings.mass)
    y = -weight * energies.v / (1 + weighted / (mass + MASS_FLOOR))
    weighted_squares = _last(weight * square, starts[0], weighted, fadings.weighted)
    after = mass_of_columns(_last(weights, starts[1], mass, fadings.mass), form)
    return pi, y.to(w.dtype), squares, weighted_squares, after


def causal_gradients(
    cotangents: tuple[Tensor, ...],
    inputs: tuple[Tensor | None, ...],
    mask: Tensor | None,
    form: Form,
    packing: Packing | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, differentiable.

    Args:
        cotangents: Gradients of y and of the sums after the last token.
        inputs: w, temperature, bias, scale, decay and the sums before the first token.
        mask: Real tokens, ``[B, N]``.
        form: Options of the call.
        packing: Where the sequences of the row begin; None if each row is one.
    """

    def run(w: Tensor, temperature: Tensor, bias: Any, scale: Any, decay: Any, *before: Tensor) -> tuple[Tensor, ...]:
        y, sums = causal_formulas(Inputs(w, temperature, mask, bias, Sums(*before), scale, decay, packing), form)
        return (y, *sums)

    return gradients(run, inputs, cotangents)


class _CausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, mask: Tensor | None, *tensors: *_CausalTensors) -> tuple[Tensor, ...]:
        pi, *outputs = causal_forward(form, mask, *tensors)
        ctx.form = form
        ctx.save_for_backward(mask, pi, *tensors)
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor, d_squares: Tensor, d_weighted: Tensor, d_mass: Tensor
    ) -> tuple[Tensor | None, ...]:
        mask, pi, *tensors = ctx.saved_tensors
        if wants_graph():
            cotangents = (dy, d_squares, d_weighted, d_mass)
            return None, None, *causal_gradients(cotangents, tuple(tensors), mask, ctx.form)
        w, _, _, _, decay, _, *before = tensors
        energies = _Energies.of(ctx.form, mask, *tensors)
        form, layout, fadings = ctx.form, energies.layout, energies.fadings
        v, o, weight = energies.v, zero_padding(dy.to(pi.dtype), mask), pi.unsqueeze(-1)
        starts = (before[0], mass_columns(before[1], form))
        weighted = running_sums(weight * energies.square, starts[0], fadings.weighted)
        mass = running_sums(weight.expand(-1, -1, -1, layout.num_masses), starts[1], fadings.mass)
        floored = mass + MASS_FLOOR
        gain = floored / (floored + weighted)

        direct = gain.square() * weight * o * v / floored
        to_mass = -layout.collect(direct * weighted / floored, layout.weighted)
        bar_weighted = _reach(direct, d_weighted, fadings.weighted)
        bar_mass = _reach(to_mass, mass_columns(d_mass, form), fadings.mass)
        d_pi = (v * (v * bar_weighted.upto - o * gain)).sum(dim=-1) + bar_mass.upto.sum(dim=-1)
        through = energies.through(d_squares, _through_logits(pi, d_pi))
        dw = 2 * v * sum(through.terms, weight * bar_weighted.upto) - weight * o * gain
        d_decay = None
        if decay is not None:
            sums = (_Faded(bar_weighted, weighted, starts[0], layout.weighted), _Faded(bar_mass, mass, starts[1]))
            d_decay = _through_decay(decay, mask, layout, through.squares, *sums)
        rest = (through.temperature, through.bias, through.scale, d_decay, through.squares.reach.start)
        return None, None, dw.to(w.dtype), *rest, bar_weighted.start, mass_of_columns(bar_mass.start, form)


# --- Gated statistics

_GATED_CHUNK = 256  # tokens whose covariances are in memory at the same time


def gated_tssa(inputs: GatedInputs) -> GatedResults:
    """Return mean and step of every token, and mean and covariance after the last one."""
    if inputs.packing is not None:
        return _gated_groups(inputs, inputs.packing)
    g, (w, write), (last, covariance) = inputs.block_size, inputs.zeroed(), inputs.start()
    means, steps = [w[:, :0]], [w[:, :0]]
    whole = torch.compiler.is_exporting()  # the number of pieces would fix the length
    for rows in [slice(None)] if whole else [slice(n, n + _GATED_CHUNK) for n in range(0, w.shape[1], _GATED_CHUNK)]:
        mean, step, last, covariance = _replayed(partial(_gated_chunk, g), w[:, rows], write[:, rows], last, covariance)
        means.append(mean)
        steps.append(step)
    mean, step = (zero_padding(torch.cat(each, dim=1), inputs.mask) for each in (means, steps))
    return mean, step, last, covariance


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
    covariances = linear_recurrence(fading.flatten(2), added.flatten(2), covariance.flatten(1)).reshape(
        *w.shape[:3], -1
    )
    step = Shrinkage(covariances, D, block_size).solve(a * change)
    return means, step, means[:, -1], covariances[:, -1]


def _gated_groups(inputs: GatedInputs, packing: Packing) -> GatedResults:
    """Run packed sequences in a few padded batches."""
    groups, (last, covariance) = list(packing.groups()), inputs.start()
    results = [
        gated_tssa(
            GatedInputs(
                w=group.take(inputs.w),
                write=group.take(inputs.write),
                mask=group.mask(inputs.mask),
                mean=last.index_select(0, group.sequences),
                covariance=covariance.index_select(0, group.sequences),
            )
        )
        for group in groups
    ]
    if not results:
        w, _ = inputs.zeroed()
        return w, w, last, covariance
    back = torch.cat([group.sequences for group in groups]).argsort()
    mean, step = (put_tokens([each[i] for each in results], groups, inputs.w) for i in range(2))
    last, covariance = (torch.cat([each[i] for each in results]).index_select(0, back) for i in (2, 3))
    return mean, step, last, covariance


# --- Statistics in blocks, or about a mean: formulas that are replayed piece by piece


def block_tssa(inputs: Inputs, form: Form, reduce: _Reduce = _alone) -> Tensor:
    """Run `tssa` with statistics in blocks, or about a mean.

    Args:
        inputs: The tensors; those of this process where sequences are shared.
        form: Options of the call.
        reduce: Adds a sum over these tokens to those of the other processes; differentiable.
    """
    w, temperature, mask, *_ = inputs
    squares, count, mean = None, None, None
    # Widened once: gradients of the pieces below add up before they are rounded to the dtype of w.
    v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
    if form.normalize:
        squares = reduce(_replayed(lambda v: v.square().sum(dim=1, keepdim=True), v))
    if form.count_scaled:
        count = reduce(num_tokens(w, mask)).to(v.dtype)[:, None, None]
    pi = _replayed(lambda v, t, squares: _memberships_in(v.square(), t, mask, squares, count), v, temperature, squares)
    if form.centered:
        mean = _group_mean(v, pi, reduce)
    moment = _group_moments(v, pi, form, mean, reduce)

    def shrink(v: Tensor, pi: Tensor, moment: Tensor, mean: Tensor | None) -> Tensor:
        v = v if mean is None else v - mean
        return (-pi.unsqueeze(-1) * Shrinkage(moment, v.shape[-1], form.block_size).solve(v)).to(w.dtype)

    y: Tensor = _replayed(shrink, v, pi, moment, mean)
    return y


def _group_mean(v: Tensor, pi: Tensor, reduce: _Reduce) -> Tensor:
    """Return the means of the groups, [B, 1, H, D]; v is 0 where there is padding."""

    def sums(v: Tensor, pi: Tensor) -> Tensor:
        weight = pi.unsqueeze(-1)
        return torch.cat(((weight * v).sum(dim=1), weight.sum(dim=1)), dim=-1)

    total = reduce(_replayed(sums, v, pi)).unsqueeze(1)
    return total[..., :-1] / (total[..., -1:] + MASS_FLOOR)


def _group_moments(v: Tensor, pi: Tensor, form: Form, mean: Tensor | None, reduce: _Reduce) -> Tensor:
    """Return the second moments, about the mean if there is one, packed, [B, 1, H, P]."""

    def sums(v: Tensor, pi: Tensor, mean: Tensor | None) -> Tensor:
        weight = pi.unsqueeze(-1)
        v = v if mean is None else v - mean  # padding too, but its weight is 0
        return torch.cat((sum_products(weight * v, v, form.block_size), weight.sum(dim=1)), dim=-1)

    total = reduce(_replayed(sums, v, pi, mean)).unsqueeze(1)
    return total[..., :-1] / (total[..., -1:] + MASS_FLOOR)


def group_moments(w: Tensor, pi: Tensor, mask: Tensor | None, form: Form) -> Tensor:
    """Return the second moments that `tssa` finds with memberships pi, packed, ``[B, 1, H, P]``."""
    v = zero_padding(w.to(pi.dtype), mask)
    mean = _group_mean(v, pi, _alone) if form.centered else None
    return _group_moments(v, pi, form, mean, _alone)


# Tokens in a chunk of the causal form with blocks.
_CHUNK = 64


def _causal_block_tssa(form: Form, mask: Tensor | None, *tensors: *_CausalTensors) -> tuple[Tensor, ...]:
    """Return y and the three sums after the last token."""
    w, temperature, bias, scale, decay, start, *after = tensors
    v = zero_padding(w.to(statistics_dtype(w.dtype)), mask)  # widened once, as in `block_tssa`
    given = (v, temperature, bias, scale, decay, start)
    pi, squares = _replayed(lambda *given: _Energies.of(form, mask, *given).memberships(), *given)
    size = _CHUNK if form.block_size > 1 else max(w.shape[1], 1)  # no products of features, so no chunks
    outputs = []
    for first in range(0, max(w.shape[1], 1), size):
        rows = slice(first, first + size)
        own = decay if decay is None or decay.dim() == 1 else decay[:, rows]
        here = None if mask is None else mask[:, rows]

        def run(*given: Any, here: Tensor | None = here) -> tuple[Tensor, Tensor, Tensor]:
            chunk = _Chunk(form, here, *given)
            return -chunk.weight * chunk.shrinkage.solve(chunk.tokens), *chunk.after()

        y, *after = _replayed(run, v[:, rows], pi[:, rows], own, *after)
        outputs.append(y)
    return torch.cat(outputs, dim=1).to(w.dtype), squares, *after


def causal_moments(w: Tensor, pi: Tensor, mask: Tensor | None, decay: Tensor | None, form: Form) -> Tensor:
    """Return those that `causal_tssa` finds for every token, ``[B, N, H, P]``; `decay` as in `Inputs`."""
    decay = None if decay is None else one_for_padding(decay.to(pi.dtype), mask)
    return _Chunk(form, mask, w, pi, decay, *empty_sums(w.to(pi.dtype), form)[1:]).shrinkage.moments


class _Chunk:
    """Some consecutive tokens, with the sums up to each of them."""

    def __init__(
        self,
        form: Form,
        mask: Tensor | None,
        w: Tensor,
        pi: Tensor,
        decay: Tensor | None,
        weighted: Tensor,
        mass: Tensor,
    ) -> None:
        D, self._form = w.shape[-1], form
        layout = Layout(D, form, w.device)
        fadings = _Fadings.of(decay, mask, w, layout)
        v, self.weight = zero_padding(w.to(pi.dtype), mask), pi.unsqueeze(-1)
        summed = products(v, form.block_size)
        summed = torch.cat((summed, v), dim=-1) if form.centered else summed
        self._weighted = (
            self.weight * summed,
            weighted,
            running_sums(self.weight * summed, weighted, fadings.weighted),
        )
        weights, start = self.weight.expand(-1, -1, -1, layout.num_masses), mass_columns(mass, form)
        self._mass = (weights, start, running_sums(weights, start, fadings.mass))
        self._fadings = fadings
        moments = self._weighted[-1] / layout.spread(self._mass[-1] + MASS_FLOOR, layout.weighted)
        moments, mean = (moments[..., :-D], moments[..., -D:]) if form.centered else (moments, None)
        self.tokens = v if mean is None else v - mean
        self.shrinkage = Shrinkage(moments, D, form.block_size, mean)

    def after(self) -> tuple[Tensor, Tensor]:
        """Return the weighted products and the mass after the last token."""
        weighted = _last(*self._weighted, self._fadings.weighted)
        return weighted, mass_of_columns(_last(*self._mass, self._fadings.mass), self._form)
