"""Non-causal TSSA by the native CPU kernel, registered as torch operators.

``torch.ops.tost.tssa`` returns y together with what its backward pass needs. Shapes: w, y [B, N, H, D], temperature
[H], mask [B, N], pi [B, N, H], squares, weighted [B, H, D], mass [B, H]; all but w, y and dy in the statistics' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tost.ops import _native
from tost.ops._numerics import statistics_dtype

__all__ = ["tssa_native", "tssa_native_"]


def tssa_native(w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w."""
    temperature = temperature.to(statistics_dtype(w.dtype))
    outputs: tuple[Tensor, ...] = torch.ops.tost.tssa(w, temperature, mask, normalize, count_scaled)
    return outputs[0]


def tssa_native_(w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool) -> Tensor:
    """Overwrite w with y, and return it."""
    torch.ops.tost.tssa_(w, temperature.to(statistics_dtype(w.dtype)), mask, normalize, count_scaled)
    return w


def _outputs(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return unfilled pi, squares, weighted and mass."""
    B, N, H, D = w.shape
    dtype = statistics_dtype(w.dtype)
    shapes = ((B, N, H), (B, H, D), (B, H, D), (B, H))
    pi, squares, weighted, mass = (torch.empty(shape, dtype=dtype, device=w.device) for shape in shapes)
    return pi, squares, weighted, mass


def _run_forward(
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    normalize: bool,
    count_scaled: bool,
    y: Tensor,
    kept: tuple[Tensor, ...],
) -> None:
    tensors = (w, temperature.contiguous(), None if mask is None else mask.contiguous(), y, *kept)
    call = _native.Forward(torch.get_num_threads(), normalize, _native.shape_of(w), *map(_native.address, tensors))
    call.count_scaled = count_scaled
    _native.run("tost_tssa_forward", w.dtype, call)


torch.library.define(
    "tost::tssa",
    "(Tensor w, Tensor temperature, Tensor? mask, bool normalize, bool count_scaled=False) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "tost::tssa_", "(Tensor(a!) w, Tensor temperature, Tensor? mask, bool normalize, bool count_scaled=False) -> ()"
)
torch.library.define(
    "tost::tssa_backward",
    "(Tensor dy, Tensor w, Tensor temperature, Tensor? mask, bool normalize, "
    "Tensor pi, Tensor squares, Tensor weighted, Tensor mass, bool count_scaled=False) -> (Tensor, Tensor)",
)


@torch.library.impl("tost::tssa", "CPU")
def _tssa(
    w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y, kept = torch.empty(w.shape, dtype=w.dtype, device=w.device), _outputs(w)
    _run_forward(w.contiguous(), temperature, mask, normalize, count_scaled, y, kept)
    return (y, *kept)


@torch.library.register_fake("tost::tssa")  # type: ignore[untyped-decorator]
def _tssa_fake(
    w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (torch.empty(w.shape, dtype=w.dtype, device=w.device), *_outputs(w))


@torch.library.impl("tost::tssa_", "CPU")
def _tssa_inplace(
    w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool = False
) -> None:
    y = w.contiguous()
    _run_forward(y, temperature, mask, normalize, count_scaled, y, kept=())
    if y is not w:
        w.copy_(y)


@torch.library.register_fake("tost::tssa_")  # type: ignore[untyped-decorator]
def _tssa_inplace_fake(
    w: Tensor, temperature: Tensor, mask: Tensor | None, normalize: bool, count_scaled: bool = False
) -> None:
    return None


@torch.library.impl("tost::tssa_backward", "CPU")
def _tssa_backward(
    dy: Tensor,
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    normalize: bool,
    pi: Tensor,
    squares: Tensor,
    weighted: Tensor,
    mass: Tensor,
    count_scaled: bool = False,
) -> tuple[Tensor, Tensor]:
    w, dy, temperature = w.contiguous(), dy.contiguous(), temperature.contiguous()
    mask = None if mask is None else mask.contiguous()
    dw, dtemperature = torch.empty_like(w), torch.empty_like(temperature)
    tensors = (w, dy, temperature, mask, pi, squares, weighted, mass, dw, dtemperature)
    call = _native.Backward(torch.get_num_threads(), normalize, _native.shape_of(w), *map(_native.address, tensors))
    call.count_scaled = count_scaled
    _native.run("tost_tssa_backward", w.dtype, call)
    return dw, dtemperature


@torch.library.register_fake("tost::tssa_backward")  # type: ignore[untyped-decorator]
def _tssa_backward_fake(
    dy: Tensor,
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    normalize: bool,
    pi: Tensor,
    squares: Tensor,
    weighted: Tensor,
    mass: Tensor,
    count_scaled: bool = False,
) -> tuple[Tensor, Tensor]:
    return torch.empty(w.shape, dtype=w.dtype, device=w.device), torch.empty_like(temperature)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    w, temperature, mask, ctx.normalize, ctx.count_scaled = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, temperature, mask, *output[1:])


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    w, temperature, mask, *saved = ctx.saved_tensors
    dw, dtemperature = torch.ops.tost.tssa_backward(
        dy.to(w.dtype), w, temperature, mask, ctx.normalize, *saved, ctx.count_scaled
    )
    return dw, dtemperature, None, None, None


torch.library.register_autograd("tost::tssa", _backward, setup_context=_setup_context)
