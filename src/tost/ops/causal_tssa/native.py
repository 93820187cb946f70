"""Causal TSSA by the native CPU kernel, registered as torch operators.

``torch.ops.tost.causal_tssa`` returns y, the sums after the last token, and what its backward pass needs. Shapes: w, y
[B, N, H, D], temperature, decay [H], bias, scale [B or 1, N, H], mask [B, N], pi [B, N, H], squares, weighted
[B, H, D], mass [B, H], starts [B, chunks, 2HD + H]; all but w, y and dy in the statistics' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tost.ops import _native
from tost.ops._numerics import statistics_dtype
from tost.ops.causal_tssa._sums import Sums

__all__ = ["causal_tssa_native", "causal_tssa_native_"]


def causal_tssa_native(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    before: Sums | None,
    scale: Tensor | None,
    decay: Tensor | None,
) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    temperature = temperature.to(statistics_dtype(w.dtype))
    y, squares, weighted, mass, *_ = torch.ops.tost.causal_tssa(
        w, temperature, bias, mask, *(before or (None, None, None)), scale, decay
    )
    return y, Sums(squares, weighted, mass)


def causal_tssa_native_(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    before: Sums | None,
    scale: Tensor | None,
    decay: Tensor | None,
) -> tuple[Tensor, Sums]:
    """Overwrite w with y, and return it with the sums after the last token."""
    temperature = temperature.to(statistics_dtype(w.dtype))
    sums = torch.ops.tost.causal_tssa_(w, temperature, bias, mask, *(before or (None, None, None)), scale, decay)
    return w, Sums(*sums)


def _unfilled(w: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=statistics_dtype(w.dtype), device=w.device) for shape in shapes)


def _sums_after(w: Tensor) -> tuple[Tensor, ...]:
    """Return unfilled squares, weighted and mass."""
    B, _, H, D = w.shape
    return _unfilled(w, (B, H, D), (B, H, D), (B, H))


def _kept(w: Tensor) -> tuple[Tensor, ...]:
    """Return unfilled pi and starts, which only the backward pass needs."""
    B, N, H, D = w.shape
    chunks = (N + _native.CAUSAL_CHUNK - 1) // _native.CAUSAL_CHUNK
    return _unfilled(w, (B, N, H), (B, chunks, 2 * H * D + H))


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _stride(x: Tensor | None) -> int:
    """Numbers from one sequence's bias or scale to the next; 0 where all sequences share one."""
    return 0 if x is None or x.shape[0] == 1 else x.shape[1] * x.shape[2]


def _run_forward(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    before: tuple[Tensor | None, ...],
    options: tuple[Tensor | None, Tensor | None],
    y: Tensor,
    kept: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    """Fill y and `kept`, and return the sums after the last token; `options` are the scale and the decay."""
    inputs, after, dense_options = _dense(temperature, bias, mask, *before), _sums_after(w), _dense(*options)
    first = map(_native.address, (w, *inputs[:2]))
    rest = map(_native.address, (*inputs[2:], y, *kept, *after))
    call = _native.CausalForward(torch.get_num_threads(), _native.shape_of(w), *first, _stride(bias), *rest)
    call.scale, call.decay = map(_native.address, dense_options)
    call.scale_stride = _stride(options[0])
    _native.run("tost_causal_tssa_forward", w.dtype, call)
    return after


_ARGUMENTS = (
    "Tensor temperature, Tensor? bias, Tensor? mask, Tensor? squares, Tensor? weighted, Tensor? mass, "
    "Tensor? scale=None, Tensor? decay=None"
)
torch.library.define(
    "tost::causal_tssa", f"(Tensor w, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
torch.library.define("tost::causal_tssa_", f"(Tensor(a!) w, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "tost::causal_tssa_backward",
    "(Tensor dy, Tensor? dsquares, Tensor? dweighted, Tensor? dmass, Tensor w, Tensor temperature, Tensor? bias, "
    "Tensor? mask, Tensor pi, Tensor starts, Tensor? scale=None, Tensor? decay=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("tost::causal_tssa", "CPU")
def _causal_tssa(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    squares: Tensor | None,
    weighted: Tensor | None,
    mass: Tensor | None,
    scale: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, ...]:
    y, kept = torch.empty(w.shape, dtype=w.dtype, device=w.device), _kept(w)
    after = _run_forward(w.contiguous(), temperature, bias, mask, (squares, weighted, mass), (scale, decay), y, kept)
    return (y, *after, *kept)


@torch.library.register_fake("tost::causal_tssa")  # type: ignore[untyped-decorator]
def _causal_tssa_fake(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    squares: Tensor | None,
    weighted: Tensor | None,
    mass: Tensor | None,
    scale: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return (torch.empty(w.shape, dtype=w.dtype, device=w.device), *_sums_after(w), *_kept(w))


@torch.library.impl("tost::causal_tssa_", "CPU")
def _causal_tssa_inplace(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    squares: Tensor | None,
    weighted: Tensor | None,
    mass: Tensor | None,
    scale: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, ...]:
    y = w.contiguous()
    after = _run_forward(y, temperature, bias, mask, (squares, weighted, mass), (scale, decay), y, kept=(None, None))
    if y is not w:
        w.copy_(y)
    return after


@torch.library.register_fake("tost::causal_tssa_")  # type: ignore[untyped-decorator]
def _causal_tssa_inplace_fake(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    squares: Tensor | None,
    weighted: Tensor | None,
    mass: Tensor | None,
    scale: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return _sums_after(w)


@torch.library.impl("tost::causal_tssa_backward", "CPU")
def _causal_tssa_backward(
    dy: Tensor,
    dsquares: Tensor | None,
    dweighted: Tensor | None,
    dmass: Tensor | None,
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    pi: Tensor,
    starts: Tensor,
    scale: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, ...]:
    outputs, dense_options = _gradients(w, scale, decay), _dense(scale, decay)
    inputs = _dense(w, dy, temperature, bias, mask, pi, starts, dsquares, dweighted, dmass)
    first, rest = (map(_native.address, part) for part in (inputs[:4], (*inputs[4:], *outputs[:6])))
    call = _native.CausalBackward(torch.get_num_threads(), _native.shape_of(w), *first, _stride(bias), *rest)
    call.scale, call.decay, call.dscale, call.ddecay = map(_native.address, (*dense_options, *outputs[6:]))
    call.scale_stride = _stride(scale)
    _native.run("tost_causal_tssa_backward", w.dtype, call)
    return outputs


@torch.library.register_fake("tost::causal_tssa_backward")  # type: ignore[untyped-decorator]
def _causal_tssa_backward_fake(
    dy: Tensor,
    dsquares: Tensor | None,
    dweighted: Tensor | None,
    dmass: Tensor | None,
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    pi: Tensor,
    starts: Tensor,
    scale: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return _gradients(w, scale, decay)


def _gradients(w: Tensor, scale: Tensor | None, decay: Tensor | None) -> tuple[Tensor, ...]:
    """Return unfilled dw, dtemperature, denergy [B, N, H], the gradients of the sums before, dscale [B, N, H], ddecay.

    The last two are empty where there is no scale, or no decay.
    """
    B, N, H, _ = w.shape
    dw = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    options = _unfilled(w, (0,) if scale is None else (B, N, H), (0,) if decay is None else (H,))
    return (dw, *_unfilled(w, (H,), (B, N, H)), *_sums_after(w), *options)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    w, temperature, bias, mask, squares, _, _, scale, decay = inputs
    ctx.set_materialize_grads(False)
    ctx.has_sums_before = squares is not None
    ctx.save_for_backward(w, temperature, bias, mask, *output[4:], scale, decay)


def _backward(ctx: Any, dy: Tensor | None, *dsums: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None and all(x is None for x in dsums[:3]):
        return (None,) * 9
    w, temperature, bias, mask, pi, starts, scale, decay = ctx.saved_tensors
    dy = torch.zeros_like(w) if dy is None else dy.to(w.dtype)
    dw, dtemperature, denergy, *dbefore, dscale, ddecay = torch.ops.tost.causal_tssa_backward(
        dy, *dsums[:3], w, temperature, bias, mask, pi, starts, scale, decay
    )
    return (
        dw,
        dtemperature,
        None if bias is None else (w.shape[-1] * denergy).sum_to_size(bias.shape),
        None,
        *(dbefore if ctx.has_sums_before else (None, None, None)),
        None if scale is None else dscale.sum_to_size(scale.shape),
        None if decay is None else ddecay,
    )


torch.library.register_autograd("tost::causal_tssa", _backward, setup_context=_setup_context)
