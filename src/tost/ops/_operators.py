"""The operators of backends that have kernels: schemas, derivatives and floating point operations.

A backend registers six operators under one name each, ``tost::tssa``, ``tost::causal_tssa`` and so on, and all have the
same arguments. Their kernels have a forward and a backward pass. Everything else, such as second derivatives and the
transforms of ``torch.func``, goes through the differentiable formulas of `tost.ops.pytorch`.

Shapes: w, y, dy [B, N, H, D], temperature [H], bias [B or 1, N, H], mask [B, N], pi [B, N, H], write [B, N, H, D / g],
sums as in `TSSAState` and `GatedState`; all but w, y and dy in the dtype of the statistics. Packed sequences are in one
row, B = 1, and begin where cu_seqlens [S + 1] says; sums then have S entries. `form` are the fields of `Form` that
`FLAGS` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tost.ops import pytorch
from tost.ops._inputs import Inputs, Sums, empty_sums
from tost.ops._numerics import statistics_dtype
from tost.ops._transforms import is_transformed, wants_graph
from tost.ops.flops import gated_flops, tssa_flops
from tost.ops.form import Form
from tost.ops.packing import Packing
from tost.ops.state import sum_shapes

Tensors = tuple[Tensor, ...]

_CAUSAL = "temperature, Tensor? bias, Tensor? mask, Tensor? squares, Tensor? weighted, Tensor? mass, Tensor? cu_seqlens"
_GATED = "Tensor w, Tensor write, Tensor? mask, Tensor? mean, Tensor? covariance, Tensor? cu_seqlens"
SCHEMAS = {
    "tssa": "Tensor w, Tensor temperature, Tensor? mask, Tensor? cu_seqlens, int[] form",
    "tssa_": "Tensor(a!) w, Tensor temperature, Tensor? mask, Tensor? cu_seqlens, int[] form",
    "tssa_backward": "Tensor dy, Tensor w, Tensor temperature, Tensor? mask, Tensor pi, Tensor squares, "
    "Tensor weighted, Tensor mass, Tensor? cu_seqlens, int[] form",
    "causal_tssa": f"Tensor w, Tensor {_CAUSAL}",
    "causal_tssa_": f"Tensor(a!) w, Tensor {_CAUSAL}",
    "causal_tssa_backward": "Tensor dy, Tensor? dsquares, Tensor? dweighted, Tensor? dmass, Tensor w, "
    "Tensor temperature, Tensor? bias, Tensor? mask, Tensor pi, Tensor starts, Tensor? cu_seqlens",
    "gated_tssa": _GATED,
    "gated_tssa_backward": f"Tensor dy, Tensor? dmean_out, Tensor? dcovariance_out, {_GATED}",
}
"""Arguments of every operator. `starts` are the sums at the start of every chunk, as a backend arranges them."""

_LIBRARY = torch.library.Library("tost", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(name: str, kernel: Callable[..., Any], fake: Callable[..., Any], results: int, **place: str) -> None:
    """Register an operator.

    Args:
        name: Its name; where the schema belongs to another one, with a suffix, ``tssa_triton``.
        kernel: Runs it.
        fake: Returns unfilled tensors of the right shapes.
        results: How many tensors it returns.
        place: ``key``, the dispatch key of the kernel; ``schema``, the entry of `SCHEMAS` if it is not `name`.
    """
    arguments = SCHEMAS[place.get("schema", name)]
    _LIBRARY.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * results)})")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, place.get("key", "CPU"))  # type: ignore[no-untyped-call]

    def unfilled_results(*given: Any) -> Any:
        if len({x.device for x in given if isinstance(x, Tensor)}) > 1:
            raise ValueError(f"tost::{name}: its tensors are on different devices.")
        return fake(*given)

    torch.library.register_fake(f"tost::{name}", unfilled_results, lib=_LIBRARY)
    register_flop_formula(getattr(torch.ops.tost, name))(_flop_counter(arguments))


def _flop_counter(schema: str) -> Callable[..., int]:
    """Return a formula for `torch.utils.flop_counter`, which calls it with shapes in place of tensors."""
    names = argument_names(schema)

    def count(*arguments: Any, **_: Any) -> int:
        given = dict(zip(names, arguments, strict=True))
        B, N, H, D = given["w"]
        if "write" in given:
            per_token = gated_flops(H * D, D // given["write"][-1])
        elif "form" in given:
            per_token = tssa_flops(H, D, causal=False, block_size=Form.from_flags(given["form"]).block_size)
        else:
            per_token = tssa_flops(H, D, causal=True, bias=given["bias"] is not None)
        return B * N * per_token * (2 if "dy" in given else 1)

    return count


def argument_names(schema: str) -> list[str]:
    """Return the names of the arguments of a schema."""
    return [argument.rpartition(" ")[2] for argument in schema.split(", ")]


def sequences(w: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the number of sequences: B, or S in one row."""
    return w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def unfilled(w: Tensor, *shapes: tuple[int, ...]) -> Tensors:
    """Return unfilled tensors in the dtype of the statistics."""
    dtype, device = statistics_dtype(w.dtype), w.device
    return tuple([torch.empty(shape, dtype=dtype, device=device) for shape in shapes])


def unfilled_sums(w: Tensor, cu_seqlens: Tensor | None, *before: tuple[int, ...], block_size: int = 1) -> Tensors:
    """Return unfilled squares, weighted and mass, after tensors of the shapes `before`."""
    return unfilled(w, *before, *sum_shapes(sequences(w, cu_seqlens), w.shape[2], w.shape[3], block_size))


def like_tokens(w: Tensor) -> Tensor:
    """Return an unfilled contiguous tensor like w."""
    return torch.empty_like(w, memory_format=torch.contiguous_format)


def tssa_gradients(dy: Tensor, w: Tensor, temperature: Tensor, *_: Any) -> Tensors:
    """Return unfilled dw and dtemperature for the arguments of ``tssa_backward``."""
    return like_tokens(w), torch.empty_like(temperature, memory_format=torch.contiguous_format)


def causal_gradients(*arguments: Any) -> Tensors:
    """Return unfilled results of ``causal_tssa_backward`` for its arguments.

    These are dw, dtemperature, the gradients of the energies and of the sums before.
    """
    w, cu_seqlens = arguments[4], arguments[-1]
    (B, N, H, _) = w.shape
    return like_tokens(w), *unfilled_sums(w, cu_seqlens, (H,), (B, N, H))


def is_differentiated(arguments: Sequence[Any]) -> bool:
    """Return whether autograd records a call with these arguments."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def run_tssa(name: str, inputs: Inputs, form: Form) -> Tensor:
    """Run ``tost::name`` on the inputs of a backend and return y."""
    if is_transformed():
        return pytorch.tssa_formulas(inputs, form)
    arguments = tssa_arguments(inputs, form)
    if is_differentiated(arguments):
        y: Tensor = _TSSA.apply(name, *arguments)  # type: ignore[no-untyped-call]
    else:
        y = getattr(torch.ops.tost, name).default(*arguments)[0]
    return y


def tssa_arguments(inputs: Inputs, form: Form) -> tuple[Any, ...]:
    """Return the arguments of ``tssa``."""
    cu_seqlens = None if inputs.packing is None else inputs.packing.cu_seqlens
    return inputs.w, _temperature(inputs), inputs.mask, cu_seqlens, form.flags()


def run_causal(name: str, inputs: Inputs) -> tuple[Tensor, Sums]:
    """Run ``tost::name`` on the inputs of a backend; return y and the sums after the last token."""
    if is_transformed():
        return pytorch.causal_formulas(inputs)
    arguments = causal_arguments(inputs)
    if is_differentiated(arguments):
        y, *sums = _CausalTSSA.apply(name, *arguments)  # type: ignore[no-untyped-call]
    else:
        outputs = getattr(torch.ops.tost, name).default(*arguments)
        y, sums = outputs[0], outputs[-3:]
    return y, Sums(*sums)


def causal_arguments(inputs: Inputs) -> tuple[Any, ...]:
    """Return the arguments of ``causal_tssa``."""
    w, _, mask, bias, before, packing = inputs
    cu_seqlens = None if packing is None else packing.cu_seqlens
    sums = before or (None, None, None)
    return w, _temperature(inputs), bias, mask, *sums, cu_seqlens


def _temperature(inputs: Inputs) -> Tensor:
    given, dtype = inputs.temperature, statistics_dtype(inputs.w.dtype)
    return given if given.dtype == dtype else given.to(dtype)


def _packing(cu_seqlens: Tensor | None, w: Tensor) -> Packing | None:
    return None if cu_seqlens is None else Packing(cu_seqlens, (1, w.shape[1]))


class _TSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, *arguments: Any) -> Tensor:
        outputs: Tensors = getattr(torch.ops.tost, name).default(*arguments)
        ctx.name, ctx.form = name, arguments[-1]
        ctx.save_for_backward(*arguments[:3], *outputs[1:], arguments[3])
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w, temperature, mask, *saved, cu_seqlens = ctx.saved_tensors
        if wants_graph() or is_transformed():
            form = Form.from_flags(ctx.form)
            found = pytorch.tssa_gradients(dy, w, temperature, mask, form, _packing(cu_seqlens, w))
        else:
            operator = getattr(torch.ops.tost, f"{ctx.name}_backward").default
            found = operator(dy.to(w.dtype), w, temperature, mask, *saved, cu_seqlens, ctx.form)
        return None, *found, None, None, None


class _CausalTSSA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, *arguments: Any) -> Tensors:
        y, pi, starts, squares, weighted, mass = getattr(torch.ops.tost, name).default(*arguments)
        ctx.name = name
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments, pi, starts)
        return y, squares, weighted, mass

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *dsums: Tensor | None) -> tuple[Tensor | None, ...]:
        w, temperature, bias, mask, *before, cu_seqlens, pi, starts = ctx.saved_tensors
        if dy is None and all(x is None for x in dsums):
            return (None,) * 9
        dy = torch.zeros_like(w) if dy is None else dy.to(w.dtype)
        if wants_graph() or is_transformed():
            start = empty_sums(w, sequences(w, cu_seqlens)) if before[0] is None else before
            given = [torch.zeros_like(x) if d is None else d for d, x in zip(dsums, start, strict=True)]
            inputs = (w, temperature, bias, *start)
            dw, dt, dbias, *dbefore = pytorch.causal_gradients((dy, *given), inputs, mask, _packing(cu_seqlens, w))
        else:
            operator = getattr(torch.ops.tost, f"{ctx.name}_backward").default
            dw, dt, denergy, *dbefore = operator(dy, *dsums, w, temperature, bias, mask, pi, starts, cu_seqlens)
            dbias = None if bias is None else (w.shape[-1] * denergy).sum_to_size(bias.shape)
        dbefore = [None] * 3 if before[0] is None else dbefore
        return None, dw, dt, dbias, None, *dbefore, None
