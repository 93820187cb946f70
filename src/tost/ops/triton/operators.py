"""The Triton kernels as registered operators: those of `tost.ops._operators` with the suffix ``_triton``, and a step.

They take tensors of any device that triton runs on. Starts are ``[chunks, H D + H D + H]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tost.ops._inputs import Inputs, Sums
from tost.ops._operators import (
    causal_gradients,
    like_tokens,
    register,
    tssa_gradients,
    unfilled_sums,
)
from tost.ops.form import Form
from tost.ops.triton.tiles import choose_tiles, num_chunks

Tensors = tuple[Tensor, ...]


def _layout(w: Tensor, cu_seqlens: Tensor | None) -> Any:
    """Return the layout of packed sequences; None if each row is one."""
    from tost.ops.triton import launch

    if cu_seqlens is None:
        return None
    return launch.packed_layout(cu_seqlens, w.shape[1], choose_tiles(*w.shape[2:]).CHUNK)


def _dense(x: Tensor | None) -> Any:
    return None if x is None else x.contiguous()


def _tssa(w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, flags: list[int]) -> Tensors:
    from tost.ops.triton import launch

    normalize, layout = Form.from_flags(flags).normalize, _layout(w, cu_seqlens)
    tokens = w.contiguous(), temperature.contiguous(), _dense(mask)
    y, pi, squares, weighted, mass = launch.tssa_forward(*tokens, normalize=normalize, layout=layout)
    return y, pi, w.new_empty(0, dtype=pi.dtype) if squares is None else squares, weighted, mass


def _tssa_outputs(w: Tensor, temperature: Any, mask: Any, cu_seqlens: Tensor | None, flags: list[int]) -> Tensors:
    pi, nothing, squares, weighted, mass = unfilled_sums(w, cu_seqlens, w.shape[:3], (0,))
    return like_tokens(w), pi, squares if Form.from_flags(flags).normalize else nothing, weighted, mass


def _tssa_backward(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    dy, w, temperature, mask, pi, squares, weighted, mass, cu_seqlens = map(_dense, arguments[:-1])
    saved = pi, squares if Form.from_flags(arguments[-1]).normalize else None, weighted, mass
    return launch.tssa_backward(dy, w, temperature, mask, *saved, layout=_layout(w, cu_seqlens))


def _causal_inputs(*tensors: Tensor | None) -> Inputs:
    """Return the tensors of ``causal_tssa``, without packing."""
    w, temperature, bias, mask, *before = map(_dense, tensors)
    return Inputs(w, temperature, mask, bias, None if before[0] is None else Sums(*before))


def _causal_tssa(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    *tensors, cu_seqlens = arguments
    inputs = _causal_inputs(*tensors)
    result = launch.causal_forward(inputs, _layout(inputs.w, cu_seqlens))
    return result.y, result.pi, torch.cat([x.flatten(1) for x in result.starts], dim=1), *result.after


def _causal_outputs(w: Tensor, *rest: Any) -> Tensors:
    (B, N, H, D), cu_seqlens = w.shape, rest[-1]
    chunk = choose_tiles(H, D).CHUNK
    # Of packed sequences only the device knows the number of chunks: as many as there can be, as in `packed_layout`.
    C = B * num_chunks(N, chunk) if cu_seqlens is None else N // chunk + cu_seqlens.shape[0] - 1
    return like_tokens(w), *unfilled_sums(w, cu_seqlens, (B, N, H), (C, H * (2 * D + 1)))


def _causal_step(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    y, after = launch.causal_step(_causal_inputs(*arguments[:-1]))
    return y, *after


def _step_outputs(w: Tensor, *rest: Any) -> Tensors:
    return like_tokens(w), *unfilled_sums(w, None)


def _causal_backward(*arguments: Any) -> Tensors:
    from tost.ops.triton import launch

    dy, *dsums, w, temperature, bias, mask, pi, starts, cu_seqlens = arguments
    inputs, layout = Inputs(*map(_dense, (w, temperature, mask, bias))), _layout(w, cu_seqlens)
    H, D = w.shape[2:]
    parts = (x.unflatten(1, (H, -1)).contiguous() for x in starts.split((H * D, H * D, H), dim=1))
    sums = Sums(*parts)
    later = _dense(dsums[0]), _dense(dsums[1]), _dense(dsums[2])
    found = launch.causal_backward(dy.contiguous(), later, inputs, pi.contiguous(), sums, layout)
    return found.w, found.temperature, temperature * found.logit, *found.before


_ANY = {"key": "CompositeExplicitAutograd"}
register("tssa_triton", _tssa, _tssa_outputs, 5, schema="tssa", **_ANY)
register("tssa_triton_backward", _tssa_backward, tssa_gradients, 2, schema="tssa_backward", **_ANY)
register("causal_tssa_triton", _causal_tssa, _causal_outputs, 6, schema="causal_tssa", **_ANY)
register("causal_tssa_triton_step", _causal_step, _step_outputs, 4, schema="causal_tssa", **_ANY)
register("causal_tssa_triton_backward", _causal_backward, causal_gradients, 6, schema="causal_tssa_backward", **_ANY)
