"""Both operators by the native CPU kernels, registered as torch operators.

``torch.ops.tost.tssa`` and ``torch.ops.tost.causal_tssa`` return y, the sums, and what their backward passes need.
Shapes: w, y [B, N, H, D], temperature, decay [H], bias, scale [B or 1, N, H], mask [B, N], pi [B, N, H], squares
[B, H, D], weighted [B, H, P], mass [B, H], starts [B, chunks, H(D + P + 1)], where P = D without blocks; all but w, y
and dy in the statistics' dtype. The fields of `Form` are the last arguments of every operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tost.ops import _library
from tost.ops._blocks import packed_width
from tost.ops._inputs import Inputs, Sums
from tost.ops._numerics import statistics_dtype
from tost.ops.form import FLAGS, Form

Tensors = tuple[Tensor, ...]
unavailable = _library.unavailable  # what the dispatcher asks every backend


def unsupported(w: Tensor) -> list[str]:
    """Return why the native kernels cannot run on the tokens `w`."""
    reasons = []
    if w.dtype not in _library.TYPES:
        reasons.append(f"supports float32, float64, bfloat16 and float16, got {str(w.dtype).removeprefix('torch.')}")
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        reasons.append("ONNX has no such operator")
    return reasons


def tssa(inputs: Inputs, form: Form) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w."""
    temperature = inputs.temperature.to(statistics_dtype(inputs.w.dtype))
    outputs: Tensors = torch.ops.tost.tssa(inputs.w, temperature, inputs.mask, *form.flags())
    return outputs[0]


def tssa_(inputs: Inputs, form: Form) -> Tensor:
    """Overwrite w with y, and return it."""
    temperature = inputs.temperature.to(statistics_dtype(inputs.w.dtype))
    torch.ops.tost.tssa_(inputs.w, temperature, inputs.mask, *form.flags())
    return inputs.w


def causal_tssa(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    y, _, _, *sums = torch.ops.tost.causal_tssa(*_causal_arguments(inputs, form))
    return y, Sums(*sums)


def causal_tssa_(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Overwrite w with y, and return it with the sums after the last token."""
    sums = torch.ops.tost.causal_tssa_(*_causal_arguments(inputs, form))
    return inputs.w, Sums(*sums)


def _causal_arguments(inputs: Inputs, form: Form) -> tuple[Any, ...]:
    w, temperature, mask, bias, before, scale, decay = inputs
    temperature = temperature.to(statistics_dtype(w.dtype))
    return (w, temperature, bias, mask, *(before or (None, None, None)), scale, decay, *form.flags())


def _unfilled(w: Tensor, *shapes: tuple[int, ...]) -> Tensors:
    dtype, device = statistics_dtype(w.dtype), w.device
    return tuple([torch.empty(shape, dtype=dtype, device=device) for shape in shapes])


def _like_tokens(w: Tensor) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


def _packed(w: Tensor, flags: Sequence[int]) -> int:
    """Return how many weighted products a head has; D of them without blocks."""
    return packed_width(w.shape[3], flags[FLAGS.index("block_size")])


def _sums(w: Tensor, flags: Sequence[int], *before: tuple[int, ...]) -> Tensors:
    """Return unfilled squares, weighted and mass, after others of the shapes `before`."""
    B, _, H, D = w.shape
    return _unfilled(w, *before, (B, H, D), (B, H, _packed(w, flags)), (B, H))


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


# Without defaults: torch leaves trailing arguments out that equal them. Types are bool or int.
_FLAGS = ", ".join(f"{field.type} {field.name}" for field in fields(Form))


def _operator(
    name: str, arguments: str, returns: int, fake: Callable[..., Tensors | None]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as ``tost::name`` for CPU tensors.

    Args:
        name: Name of the operator.
        arguments: Their schema, without the fields of `Form`.
        returns: How many tensors it returns.
        fake: Returns unfilled tensors of the right shapes for tensors that hold no data.
    """
    outputs = f"({', '.join(['Tensor'] * returns)})"
    torch.library.define(f"tost::{name}", f"({arguments}, {_FLAGS}) -> {outputs}")
    torch.library.register_fake(f"tost::{name}", fake)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.impl(f"tost::{name}", "CPU")(function)
        return function

    return register


# --- tssa


def _tssa_outputs(w: Tensor, temperature: Tensor, mask: Tensor | None, *flags: int) -> Tensors:
    """Return unfilled y, pi and the sums."""
    B, N, H, _ = w.shape
    return (_like_tokens(w), *_sums(w, flags, (B, N, H)))


def _tssa_gradients(dy: Tensor, w: Tensor, temperature: Tensor, *_: Any) -> Tensors:
    return _like_tokens(w), torch.empty_like(temperature)


@_operator("tssa", "Tensor w, Tensor temperature, Tensor? mask", 5, _tssa_outputs)
def _tssa(w: Tensor, temperature: Tensor, mask: Tensor | None, *flags: int) -> Tensors:
    outputs = _tssa_outputs(w, temperature, mask, *flags)
    _library.run("tost_tssa_forward", w, flags, (*_dense(w, temperature, mask), *outputs))
    return outputs


@_operator("tssa_", "Tensor(a!) w, Tensor temperature, Tensor? mask", 0, lambda *_: None)
def _tssa_inplace(w: Tensor, temperature: Tensor, mask: Tensor | None, *flags: int) -> None:
    y = w.contiguous()
    _library.run("tost_tssa_forward", w, flags, (y, *_dense(temperature, mask), y))
    if y is not w:
        w.copy_(y)


@_operator(
    "tssa_backward",
    "Tensor dy, Tensor w, Tensor temperature, Tensor? mask, Tensor pi, Tensor squares, Tensor weighted, Tensor mass",
    2,
    _tssa_gradients,
)
def _tssa_backward(dy: Tensor, w: Tensor, temperature: Tensor, mask: Tensor | None, *saved_and_flags: Any) -> Tensors:
    saved, flags = saved_and_flags[:4], saved_and_flags[4:]
    outputs = _tssa_gradients(dy, w, temperature)
    _library.run("tost_tssa_backward", w, flags, (*_dense(w, temperature, mask, dy), *saved, *outputs))
    return outputs


def _tssa_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    w, temperature, mask, *ctx.flags = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, temperature, mask, *output[1:])


def _tssa_autograd(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (1 + len(ctx.flags))
    if dy is None:
        return (None, None, *rest)
    w, *saved = ctx.saved_tensors
    return (*torch.ops.tost.tssa_backward(dy.to(w.dtype), w, *saved, *ctx.flags), *rest)


torch.library.register_autograd("tost::tssa", _tssa_autograd, setup_context=_tssa_setup)


# --- causal_tssa


def _causal_outputs(w: Tensor, *arguments: Any) -> Tensors:
    """Return unfilled y, pi and starts, which only the backward pass needs, and the sums after the last token."""
    B, N, H, D = w.shape
    flags = arguments[8:]
    chunks = (N + _library.CAUSAL_CHUNK - 1) // _library.CAUSAL_CHUNK
    return (_like_tokens(w), *_sums(w, flags, (B, N, H), (B, chunks, H * (D + _packed(w, flags) + 1))))


def _stride(x: Tensor | None) -> int:
    """Numbers from one sequence's bias or scale to the next; 0 where all sequences share one."""
    return 0 if x is None or x.shape[0] == 1 else x.shape[1] * x.shape[2]


def _run_causal(w: Tensor, arguments: tuple[Any, ...], outputs: tuple[Tensor | None, ...]) -> None:
    """Fill `outputs`: y, pi, starts and the sums; `arguments` are those of the operator after w."""
    temperature, bias, mask, squares, weighted, mass, scale, decay, *flags = arguments
    tensors = (*_dense(w, temperature, bias, mask, scale, decay, squares, weighted, mass), *outputs)
    _library.run("tost_causal_tssa_forward", w, flags, tensors, _stride(bias), _stride(scale))


_CAUSAL_ARGUMENTS = (
    "Tensor temperature, Tensor? bias, Tensor? mask, Tensor? squares, Tensor? weighted, Tensor? mass, "
    "Tensor? scale, Tensor? decay"
)


@_operator("causal_tssa", f"Tensor w, {_CAUSAL_ARGUMENTS}", 6, _causal_outputs)
def _causal_tssa(w: Tensor, *arguments: Any) -> Tensors:
    outputs = _causal_outputs(w, *arguments)
    _run_causal(w, arguments, outputs)
    return outputs


@_operator("causal_tssa_", f"Tensor(a!) w, {_CAUSAL_ARGUMENTS}", 3, lambda w, *arguments: _sums(w, arguments[8:]))
def _causal_tssa_inplace(w: Tensor, *arguments: Any) -> Tensors:
    y, after = w.contiguous(), _sums(w, arguments[8:])
    _run_causal(y, arguments, (y, None, None, *after))
    if y is not w:
        w.copy_(y)
    return after


def _causal_gradients(*arguments: Any) -> Tensors:
    """Return unfilled dw, dtemperature, denergy [B, N, H], the gradients of the sums before, dscale [B, N, H], ddecay.

    The last two are empty where there is no scale, or no decay.
    """
    w, scale, decay, flags = arguments[4], arguments[10], arguments[11], arguments[12:]
    B, N, H, _ = w.shape
    options = _unfilled(w, (0,) if scale is None else (B, N, H), (0,) if decay is None else (H,))
    return (_like_tokens(w), *_sums(w, flags, (H,), (B, N, H)), *options)


@_operator(
    "causal_tssa_backward",
    "Tensor dy, Tensor? dsquares, Tensor? dweighted, Tensor? dmass, Tensor w, Tensor temperature, Tensor? bias, "
    "Tensor? mask, Tensor pi, Tensor starts, Tensor? scale, Tensor? decay",
    8,
    _causal_gradients,
)
def _causal_tssa_backward(*arguments: Any) -> Tensors:
    dy, dsquares, dweighted, dmass, w, temperature, bias, mask, pi, starts, scale, decay, *flags = arguments
    outputs = _causal_gradients(*arguments)
    inputs = _dense(w, temperature, bias, mask, scale, decay, dy, dsquares, dweighted, dmass, pi, starts)
    _library.run("tost_causal_tssa_backward", w, flags, (*inputs, *outputs), _stride(bias), _stride(scale))
    return outputs


def _causal_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    w, temperature, bias, mask, squares, _, _, scale, decay, *ctx.flags = inputs
    ctx.set_materialize_grads(False)
    ctx.has_sums_before = squares is not None
    ctx.save_for_backward(w, temperature, bias, mask, *output[1:3], scale, decay)


def _causal_autograd(
    ctx: Any, dy: Tensor | None, dpi: None, dstarts: None, *dsums: Tensor | None
) -> tuple[Tensor | None, ...]:
    rest = (None,) * len(ctx.flags)
    if dy is None and all(x is None for x in dsums):
        return (*(None,) * 9, *rest)
    w, temperature, bias, mask, pi, starts, scale, decay = ctx.saved_tensors
    dy = torch.zeros_like(w) if dy is None else dy.to(w.dtype)
    dw, dtemperature, denergy, *dbefore, dscale, ddecay = torch.ops.tost.causal_tssa_backward(
        dy, *dsums, w, temperature, bias, mask, pi, starts, scale, decay, *ctx.flags
    )
    return (
        dw,
        dtemperature,
        None if bias is None else (w.shape[-1] * denergy).sum_to_size(bias.shape),
        None,
        *(dbefore if ctx.has_sums_before else (None, None, None)),
        None if scale is None else dscale.sum_to_size(scale.shape),
        None if decay is None else ddecay,
        *rest,
    )


torch.library.register_autograd("tost::causal_tssa", _causal_autograd, setup_context=_causal_setup)
