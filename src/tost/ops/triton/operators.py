"""The Triton kernels as registered operators: those of `tost.ops._operators` with the suffix ``_triton``, and a step.

They take tensors of any device that triton runs on. Starts are ``[chunks, H D + H D + H]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tost.ops._inputs import Inputs, Sums
from tost.ops._numerics import num_tokens, statistics_dtype
from tost.ops._operators import (
    causal_gradients,
    like_tokens,
    register,
    tssa_gradients,
    unfilled_sums,
)
from tost.ops.form import Form
from tost.ops.packing import Packing
from tost.ops.triton.tiles import choose_tiles, num_chunks

Tensors = tuple[Tensor, ...]
_PLAIN = Form()


def _layout(w: Tensor, cu_seqlens: Tensor | None, *, decays: bool = False) -> Any:
    """Return the layout of packed sequences; None if each row is one."""
    from tost.ops.triton import launch

    if cu_seqlens is None:
        return None
    return launch.packed_layout(cu_seqlens, w.shape[1], choose_tiles(*w.shape[2:], decays=decays).CHUNK)


def _dense(x: Tensor | None) -> Any:
    return None if x is None else x.contiguous()


def _count(w: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, form: Form) -> Tensor | None:
    if not form.count_scaled:
        return None
    counts = num_tokens(w, mask) if cu_seqlens is None else Packing(cu_seqlens, (1, w.shape[1])).num_tokens(mask)
    return counts.to(statistics_dtype(w.dtype))


def _tssa(w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, flags: list[int]) -> Tensors:
    from tost.ops.triton import launch

    form, layout = Form.from_flags(flags), _layout(w, cu_seqlens)
    tokens = (w.contiguous(), temperature.contiguous(), _dense(mask), _count(w, mask, cu_seqlens, form))
    y, pi, squares, weighted, mass = launch.tssa_forward(*tokens, normalize=form.normalize, layout=layout)
    return y, pi, w.new_empty(0, dtype=pi.dtype) if squares is None else squares, weighted, mass


def _tssa_outputs(w: Tensor, temperature: Any, mask: Any, cu_seqlens: Tensor | None, flags: list[int]) -> Tensors:
    pi, nothing, squares, weighted, mass = unfilled_sums(w, cu_seqlens, _PLAIN, w.shape[:3], (0,))
    return like_tokens(w), pi, squares if Form.from_flags(flags).normalize else nothing, weighted, mass


def _tssa_backward(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    dy, w, temperature, mask, pi, squares, weighted, mass, cu_seqlens = map(_dense, arguments[:-1])
    form = Form.from_flags(arguments[-1])
    saved = (_count(w, mask, cu_seqlens, form), pi, squares if form.normalize else None, weighted, mass)
    return launch.tssa_backward(dy, w, temperature, mask, *saved, layout=_layout(w, cu_seqlens))


def _causal_inputs(*tensors: Tensor | None) -> Inputs:
    """Return the tensors of ``causal_tssa``, without packing."""
    w, temperature, bias, mask, *before, scale, decay = map(_dense, tensors)
    sums = None if before[0] is None else Sums(*before)
    return Inputs(w, temperature, mask, bias=bias, before=sums, scale=scale, decay=decay)


def _causal_tssa(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    *tensors, cu_seqlens, _ = arguments
    inputs = _causal_inputs(*tensors)
    result = launch.causal_forward(inputs, _layout(inputs.w, cu_seqlens, decays=inputs.decay is not None))
    return result.y, result.pi, torch.cat([x.flatten(1) for x in result.starts], dim=1), *result.after


def _causal_outputs(w: Tensor, *rest: Any) -> Tensors:
    (B, N, H, D), (*_, decay, cu_seqlens, _) = w.shape, rest
    chunk = choose_tiles(H, D, decays=decay is not None).CHUNK
    # Of packed sequences only the device knows the number of chunks: as many as there can be, as in `packed_layout`.
    C = B * num_chunks(N, chunk) if cu_seqlens is None else N // chunk + cu_seqlens.shape[0] - 1
    return like_tokens(w), *unfilled_sums(w, cu_seqlens, _PLAIN, (B, N, H), (C, H * (2 * D + 1)))


def _causal_step(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    y, after = launch.causal_step(_causal_inputs(*arguments[:-2]))
    return y, *after


def _step_outputs(w: Tensor, *rest: Any) -> Tensors:
    return like_tokens(w), *unfilled_sums(w, None, _PLAIN)


def _causal_backward(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    dy, *dsums, w, temperature, bias, mask, pi, starts, scale, decay, cu_seqlens, _ = arguments
    inputs = _causal_inputs(w, temperature, bias, mask, None, None, None, scale, decay)
    layout = _layout(w, cu_seqlens, decays=decay is not None)
    H, D = w.shape[2:]
    parts = (x.unflatten(1, (H, -1)).contiguous() for x in starts.split((H * D, H * D, H), dim=1))
    sums = Sums(*parts)
    later = _dense(dsums[0]), _dense(dsums[1]), _dense(dsums[2])
    found = launch.causal_backward(dy.contiguous(), later, inputs, pi.contiguous(), sums, layout)
    options = [pi.new_empty(0) if x is None else x for x in (found.scale, found.decay)]
    return found.w, found.temperature, temperature * found.logit, *found.before, *options


_ANY = {"key": "CompositeExplicitAutograd"}
register("tssa_triton", _tssa, _tssa_outputs, 5, schema="tssa", **_ANY)
register("tssa_triton_backward", _tssa_backward, tssa_gradients, 2, schema="tssa_backward", **_ANY)
register("causal_tssa_triton", _causal_tssa, _causal_outputs, 6, schema="causal_tssa", **_ANY)
register("causal_tssa_triton_step", _causal_step, _step_outputs, 4, schema="causal_tssa", **_ANY)
register("causal_tssa_triton_backward", _causal_backward, causal_gradients, 8, schema="causal_tssa_backward", **_ANY)
