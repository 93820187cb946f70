"""The Triton kernels as registered torch operators, of their own: ``tost::tssa`` on a CPU is the native kernel.

They take tensors of any device that triton runs on. Shapes: w, y [B, N, H, D], temperature, decay [H], bias, scale
[B or 1, N, H], mask [B, N], pi [B, N, H], squares, weighted [B, H, D], mass [B, H]; the sums at the start of each chunk
[chunks, H, D] and [chunks, H]. All but w, y, dy and dw are in the dtype of the statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tost.ops._numerics import num_tokens, statistics_dtype
from tost.ops.triton.tiles import choose_tiles, num_chunks

Tensors = tuple[Tensor, ...]


def _operator(name: str, arguments: str, returns: int) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as ``tost::name``."""
    schema = f"({arguments}) -> ({', '.join(['Tensor'] * returns)})"
    return torch.library.custom_op(f"tost::{name}", mutates_args=(), schema=schema)


def _like_tokens(w: Tensor) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


def _unfilled(w: Tensor, *shapes: tuple[int, ...]) -> Tensors:
    dtype, device = statistics_dtype(w.dtype), w.device
    return tuple([torch.empty(shape, dtype=dtype, device=device) for shape in shapes])


def _sums(w: Tensor) -> Tensors:
    B, _, H, D = w.shape
    return _unfilled(w, (B, H, D), (B, H, D), (B, H))


def _dense(x: Tensor | None) -> Any:
    return None if x is None else x.contiguous()


# --- tssa


@_operator(
    "tssa_triton", "Tensor w, Tensor temperature, Tensor? mask, bool normalize, bool count_scaled", 5
)  # fmt: skip
def _tssa(w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool) -> Tensors:
    from tost.ops.triton import launch

    y, pi, squares, weighted, mass = launch.tssa_forward(
        w.contiguous(), temperature.contiguous(), _dense(mask), _count(w, mask, count_scaled), normalize=normalize
    )
    return y, pi, w.new_empty(0, dtype=pi.dtype) if squares is None else squares, weighted, mass


def _count(w: Tensor, mask: Tensor | None, count_scaled: bool) -> Tensor | None:
    return num_tokens(w, mask).to(statistics_dtype(w.dtype)) if count_scaled else None


@_tssa.register_fake  # type: ignore[untyped-decorator]
def _(w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool) -> Tensors:
    B, N, H, D = w.shape
    squares = (B, H, D) if normalize else (0,)
    return (_like_tokens(w), *_unfilled(w, (B, N, H), squares, (B, H, D), (B, H)))


@_operator(
    "tssa_triton_backward",
    "Tensor dy, Tensor w, Tensor temperature, Tensor? mask, Tensor pi, Tensor squares, Tensor weighted, Tensor mass, "
    "bool normalize, bool count_scaled",
    2,
)
def _tssa_backward(
    dy: Tensor,
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    pi: Tensor,
    squares: Tensor,
    weighted: Tensor,
    mass: Tensor,
    normalize: bool,
    count_scaled: bool,
) -> Tensors:
    from tost.ops.triton import launch

    tokens = (dy.contiguous(), w.contiguous(), temperature.contiguous(), _dense(mask), _count(w, mask, count_scaled))
    return launch.tssa_backward(*tokens, pi, squares if normalize else None, weighted, mass)


@_tssa_backward.register_fake  # type: ignore[untyped-decorator]
def _(dy: Tensor, w: Tensor, temperature: Tensor, *_: Any) -> Tensors:
    return _like_tokens(w), torch.empty_like(temperature, memory_format=torch.contiguous_format)


def _tssa_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    w, temperature, mask, *ctx.flags = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, temperature, mask, *output[1:])


def _tssa_autograd(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    w, *saved = ctx.saved_tensors
    dw, d_temperature = torch.ops.tost.tssa_triton_backward(dy.to(w.dtype), w, *saved, *ctx.flags)
    return dw, d_temperature, None, None, None


torch.library.register_autograd("tost::tssa_triton", _tssa_autograd, setup_context=_tssa_setup)


# --- causal_tssa

_CAUSAL_ARGUMENTS = (
    "Tensor w, Tensor temperature, Tensor? bias, Tensor? mask, Tensor? squares, Tensor? weighted, Tensor? mass, "
    "Tensor? scale, Tensor? decay"
)


def _causal_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of the operator as `launch.causal_forward` takes them."""
    w, temperature, bias, mask, *before, scale, decay = map(_dense, arguments)
    return w, temperature, bias, mask, tuple(before), scale, decay


@_operator("causal_tssa_triton", _CAUSAL_ARGUMENTS, 8)
def _causal_tssa(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    result = launch.causal_forward(*_causal_arguments(arguments))
    return result.y, result.pi, *result.starts, *result.after


@_causal_tssa.register_fake  # type: ignore[untyped-decorator]
def _(w: Tensor, *rest: Any) -> Tensors:
    B, N, H, D = w.shape
    C = B * num_chunks(N, choose_tiles(H, D, decays=rest[-1] is not None).CHUNK)
    return (_like_tokens(w), *_unfilled(w, (B, N, H), (C, H, D), (C, H, D), (C, H)), *_sums(w))


@_operator("causal_tssa_triton_step", _CAUSAL_ARGUMENTS, 4)
def _causal_step(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    return launch.causal_step(*_causal_arguments(arguments))


@_causal_step.register_fake  # type: ignore[untyped-decorator]
def _(w: Tensor, *_: Any) -> Tensors:
    return (_like_tokens(w), *_sums(w))


@_operator(
    "causal_tssa_triton_backward",
    "Tensor dy, Tensor? dsquares, Tensor? dweighted, Tensor? dmass, Tensor w, Tensor temperature, Tensor? bias, "
    "Tensor? mask, Tensor pi, Tensor squares, Tensor weighted, Tensor mass, Tensor? scale, Tensor? decay",
    8,
)
def _causal_backward(*arguments: Any) -> Tensors:
    """Return dw, dtemperature, the gradients of the logits, of the sums before, of the scale and of the decay.

    The last two are empty where there is no scale, or no decay.
    """
    from tost.ops.triton import launch

    dy, dsquares, dweighted, dmass, w, temperature, bias, mask, pi, squares, weighted, mass, scale, decay = map(
        _dense, arguments
    )
    starts = (squares, weighted, mass)
    found = launch.causal_backward(
        dy, (dsquares, dweighted, dmass), w, temperature, bias, mask, pi, starts, scale, decay
    )
    options = [pi.new_empty(0) if x is None else x for x in (found.scale, found.decay)]
    return found.w, found.temperature, found.logit, *found.before, *options


@_causal_backward.register_fake  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> Tensors:
    w, scale, decay = arguments[4], arguments[12], arguments[13]
    B, N, H, _ = w.shape
    options = _unfilled(w, (0,) if scale is None else (B, N, H), (0,) if decay is None else (H,))
    return (_like_tokens(w), *_unfilled(w, (H,), (B, N, H)), *_sums(w), *options)


def _causal_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    w, temperature, bias, mask, squares, _, _, scale, decay = inputs
    ctx.set_materialize_grads(False)
    ctx.has_sums_before = squares is not None
    ctx.save_for_backward(w, temperature, bias, mask, *output[1:5], scale, decay)


def _causal_autograd(ctx: Any, dy: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    dsums = rest[-3:]
    if dy is None and all(x is None for x in dsums):
        return (None,) * 9
    w, temperature, bias, *saved, scale, decay = ctx.saved_tensors
    dy = torch.zeros_like(w) if dy is None else dy.to(w.dtype)
    dw, dtemperature, dlogit, *dbefore, dscale, ddecay = torch.ops.tost.causal_tssa_triton_backward(
        dy, *dsums, w, temperature, bias, *saved, scale, decay
    )
    return (
        dw,
        dtemperature,
        None if bias is None else (w.shape[-1] * temperature * dlogit).sum_to_size(bias.shape),
        None,
        *(dbefore if ctx.has_sums_before else (None, None, None)),
        None if scale is None else dscale.sum_to_size(scale.shape),
        None if decay is None else ddecay,
    )


torch.library.register_autograd("tost::causal_tssa_triton", _causal_autograd, setup_context=_causal_setup)
