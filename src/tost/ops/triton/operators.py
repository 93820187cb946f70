"""The Triton kernels as registered torch operators, of their own: ``tost::tssa`` on a CPU is the native kernel.

They take tensors of any device that triton runs on. Shapes: w, y [B, N, H, D], temperature, decay [H], bias, scale
[B or 1, N, H], mask [B, N], pi [B, N, H], squares, weighted [B, H, D], mass [B, H]; the sums at the start of each chunk
[chunks, H, D] and [chunks, H]. All but w, y, dy and dw are in the dtype of the statistics. Sequences packed into
one row begin where cu_seqlens [S + 1] says; their sums have S entries in place of B.

Second derivatives come from the formulas of `tost.ops.pytorch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tost.ops import pytorch
from tost.ops._inputs import Inputs, Sums
from tost.ops._numerics import num_tokens, statistics_dtype
from tost.ops._transforms import wants_graph
from tost.ops.form import Form
from tost.ops.packing import Packing
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


def _sums(w: Tensor, cu_seqlens: Tensor | None = None) -> Tensors:
    B, _, H, D = w.shape
    S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _unfilled(w, (S, H, D), (S, H, D), (S, H))


def _layout(w: Tensor, cu_seqlens: Tensor | None, *, decays: bool = False) -> Any:
    """Return the layout of packed sequences; None if each row is one."""
    from tost.ops.triton import launch

    if cu_seqlens is None:
        return None
    return launch.packed_layout(cu_seqlens, w.shape[1], choose_tiles(*w.shape[2:], decays=decays).CHUNK)


def _packing(w: Tensor, cu_seqlens: Tensor | None) -> Packing | None:
    return None if cu_seqlens is None else Packing(cu_seqlens, (1, w.shape[1]))


def _one_by_one(name: str) -> None:
    """Register that ``tost::name`` is called once for each entry of a mapped batch, as that of many cotangents."""
    operator = getattr(torch.ops.tost, name)

    def rule(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensors, tuple[int, ...]]:
        each = [
            operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)))
            for i in range(info.batch_size)
        ]
        outputs = tuple([torch.stack(tensors) for tensors in zip(*each, strict=True)])
        return outputs, (0,) * len(outputs)

    torch.library.register_vmap(f"tost::{name}", rule)


def _dense(x: Tensor | None) -> Any:
    return None if x is None else x.contiguous()


# --- tssa


@_operator(
    "tssa_triton",
    "Tensor w, Tensor temperature, Tensor? mask, Tensor? cu_seqlens, bool normalize, bool count_scaled",
    5,
)
def _tssa(
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    count_scaled: bool,
) -> Tensors:
    from tost.ops.triton import launch

    tokens = (w.contiguous(), temperature.contiguous(), _dense(mask), _count(w, mask, cu_seqlens, count_scaled))
    y, pi, squares, weighted, mass = launch.tssa_forward(*tokens, normalize=normalize, layout=_layout(w, cu_seqlens))
    return y, pi, w.new_empty(0, dtype=pi.dtype) if squares is None else squares, weighted, mass


def _count(w: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, count_scaled: bool) -> Tensor | None:
    if not count_scaled:
        return None
    packing = _packing(w, cu_seqlens)
    counts = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    return counts.to(statistics_dtype(w.dtype))


@_tssa.register_fake  # type: ignore[untyped-decorator]
def _(w: Tensor, *rest: Any) -> Tensors:
    B, N, H, _ = w.shape
    *_, cu_seqlens, normalize, _ = rest
    squares, weighted, mass = _sums(w, cu_seqlens)
    pi, nothing = _unfilled(w, (B, N, H), (0,))
    return _like_tokens(w), pi, squares if normalize else nothing, weighted, mass


@_operator(
    "tssa_triton_backward",
    "Tensor dy, Tensor w, Tensor temperature, Tensor? mask, Tensor pi, Tensor squares, Tensor weighted, Tensor mass, "
    "Tensor? cu_seqlens, bool normalize, bool count_scaled",
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
    cu_seqlens: Tensor | None,
    normalize: bool,
    count_scaled: bool,
) -> Tensors:
    from tost.ops.triton import launch

    tokens = (dy.contiguous(), w.contiguous(), temperature.contiguous(), _dense(mask))
    count, layout = _count(w, mask, cu_seqlens, count_scaled), _layout(w, cu_seqlens)
    return launch.tssa_backward(*tokens, count, pi, squares if normalize else None, weighted, mass, layout=layout)


@_tssa_backward.register_fake  # type: ignore[untyped-decorator]
def _(dy: Tensor, w: Tensor, temperature: Tensor, *_: Any) -> Tensors:
    return _like_tokens(w), torch.empty_like(temperature, memory_format=torch.contiguous_format)


def _tssa_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    w, temperature, mask, cu_seqlens, *ctx.flags = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, temperature, mask, *output[1:], cu_seqlens)


def _tssa_autograd(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    w, temperature, mask, *saved, cu_seqlens = ctx.saved_tensors
    dy = dy.to(w.dtype)
    if wants_graph():
        form = Form(**dict(zip(("normalize", "count_scaled"), ctx.flags, strict=True)))
        found = pytorch.tssa_gradients(dy, w, temperature, mask, form, _packing(w, cu_seqlens))
    else:
        found = torch.ops.tost.tssa_triton_backward(dy, w, temperature, mask, *saved, cu_seqlens, *ctx.flags)
    return *found, None, None, None, None


torch.library.register_autograd("tost::tssa_triton", _tssa_autograd, setup_context=_tssa_setup)
_one_by_one("tssa_triton_backward")


# --- causal_tssa

_CAUSAL_ARGUMENTS = (
    "Tensor w, Tensor temperature, Tensor? bias, Tensor? mask, Tensor? squares, Tensor? weighted, Tensor? mass, "
    "Tensor? scale, Tensor? decay"
)


def _causal_inputs(arguments: Sequence[Any]) -> Inputs:
    """Return the tensors that `_CAUSAL_ARGUMENTS` names."""
    w, temperature, bias, mask, *before, scale, decay = map(_dense, arguments)
    sums = None if before[0] is None else Sums(*before)
    return Inputs(w, temperature, mask, bias=bias, before=sums, scale=scale, decay=decay)


@_operator("causal_tssa_triton", f"{_CAUSAL_ARGUMENTS}, Tensor? cu_seqlens", 8)
def _causal_tssa(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    inputs, cu_seqlens = _causal_inputs(arguments[:-1]), arguments[-1]
    result = launch.causal_forward(inputs, _layout(inputs.w, cu_seqlens, decays=inputs.decay is not None))
    return result.y, result.pi, *result.starts, *result.after


@_causal_tssa.register_fake  # type: ignore[untyped-decorator]
def _(w: Tensor, *rest: Any) -> Tensors:
    (B, N, H, D), (*_, decay, cu_seqlens) = w.shape, rest
    chunk = choose_tiles(H, D, decays=decay is not None).CHUNK
    # Of packed sequences only the device knows the number of chunks: as many as there can be, as in `packed_layout`.
    C = B * num_chunks(N, chunk) if cu_seqlens is None else N // chunk + cu_seqlens.shape[0] - 1
    return (_like_tokens(w), *_unfilled(w, (B, N, H), (C, H, D), (C, H, D), (C, H)), *_sums(w, cu_seqlens))


@_operator("causal_tssa_triton_step", _CAUSAL_ARGUMENTS, 4)
def _causal_step(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    y, after = launch.causal_step(_causal_inputs(arguments))
    return y, *after


@_causal_step.register_fake  # type: ignore[untyped-decorator]
def _(w: Tensor, *_: Any) -> Tensors:
    return (_like_tokens(w), *_sums(w))


@_operator(
    "causal_tssa_triton_backward",
    "Tensor dy, Tensor? dsquares, Tensor? dweighted, Tensor? dmass, Tensor w, Tensor temperature, Tensor? bias, "
    "Tensor? mask, Tensor pi, Tensor squares, Tensor weighted, Tensor mass, Tensor? scale, Tensor? decay, "
    "Tensor? cu_seqlens",
    8,
)
def _causal_backward(*arguments: Any) -> Tensors:
    """Return dw, dtemperature, the gradients of the logits, of the sums before, of the scale and of the decay.

    The last two are empty where there is no scale, or no decay.
    """
    from tost.ops.triton import launch

    *tensors, cu_seqlens = map(_dense, arguments)
    dy, dsquares, dweighted, dmass, w, temperature, bias, mask, pi, *starts, scale, decay = tensors
    inputs, layout = (
        Inputs(w, temperature, mask, bias, None, scale, decay),
        _layout(w, cu_seqlens, decays=decay is not None),
    )
    found = launch.causal_backward(dy, (dsquares, dweighted, dmass), inputs, pi, Sums(*starts), layout)
    options = [pi.new_empty(0) if x is None else x for x in (found.scale, found.decay)]
    return found.w, found.temperature, found.logit, *found.before, *options


@_causal_backward.register_fake  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> Tensors:
    w, scale, decay = arguments[4], arguments[12], arguments[13]
    B, N, H, _ = w.shape
    options = _unfilled(w, (0,) if scale is None else (B, N, H), (0,) if decay is None else (H,))
    return (_like_tokens(w), *_unfilled(w, (H,), (B, N, H)), *_sums(w, arguments[14]), *options)


def _causal_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    w, temperature, bias, mask, *before, scale, decay, cu_seqlens = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, temperature, bias, mask, *output[1:5], scale, decay, cu_seqlens, *before)


def _causal_autograd(ctx: Any, dy: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    dsums = rest[-3:]
    if dy is None and all(x is None for x in dsums):
        return (None,) * 10
    w, temperature, bias, *saved, scale, decay, cu_seqlens = ctx.saved_tensors[:-3]
    before = ctx.saved_tensors[-3:]
    dy = torch.zeros_like(w) if dy is None else dy.to(w.dtype)
    if wants_graph():
        zeros = tuple(map(torch.zeros_like, _sums(w, cu_seqlens)))
        cotangents = (dy, *(zero if d is None else d for d, zero in zip(dsums, zeros, strict=True)))
        given = (w, temperature, bias, scale, decay, *(zeros if before[0] is None else before))
        dw, dt, dbias, dscale, ddecay, *dbefore = pytorch.causal_gradients(
            cotangents, given, saved[0], Form(), _packing(w, cu_seqlens)
        )
        return dw, dt, dbias, None, *((None, None, None) if before[0] is None else dbefore), dscale, ddecay, None
    dw, dtemperature, dlogit, *dbefore, dscale, ddecay = torch.ops.tost.causal_tssa_triton_backward(
        dy, *dsums, w, temperature, bias, *saved, scale, decay, cu_seqlens
    )
    return (
        dw,
        dtemperature,
        None if bias is None else (w.shape[-1] * temperature * dlogit).sum_to_size(bias.shape),
        None,
        *((None, None, None) if before[0] is None else dbefore),
        None if scale is None else dscale.sum_to_size(scale.shape),
        None if decay is None else ddecay,
        None,
    )


torch.library.register_autograd("tost::causal_tssa_triton", _causal_autograd, setup_context=_causal_setup)
_one_by_one("causal_tssa_triton_backward")
