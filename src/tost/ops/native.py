"""Both operators by the native CPU kernels, registered as torch operators.

``torch.ops.tost.tssa`` and ``torch.ops.tost.causal_tssa`` return y, the sums, and what their backward passes need.
Derivatives that the kernels do not have, and whatever is under a transform of ``torch.func``, come from the formulas
of `tost.ops.pytorch`.
Shapes: w, y [B, N, H, D], temperature [H], bias, scale [B or 1, N, H], decay [H], [B, N, H] or [B, N, H, K], mask
[B, N], pi [B, N, H], the sums squares, weighted and mass as in `TSSAState`, starts [B, chunks, F] with the sums before
every chunk; all but w, y and dy in the statistics' dtype. The fields of `Form` in `FLAGS` are the last arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tost.ops import _library, pytorch
from tost.ops._inputs import Inputs, Sums, empty_sums
from tost.ops._numerics import MASS_FLOOR, statistics_dtype
from tost.ops._transforms import is_observed, transforms_active, wants_graph
from tost.ops.flops import tssa_flops
from tost.ops.form import FLAGS, Form, OperatorOptions
from tost.ops.packing import Packing
from tost.ops.state import sum_shapes

Tensors = tuple[Tensor, ...]
unavailable = _library.unavailable  # what the dispatcher asks every backend


def unsupported(w: Tensor, form: Form) -> list[str]:
    """Return why the native kernels cannot run on the tokens `w`, or in this form."""
    reasons = []
    if w.dtype not in _library.TYPES:
        reasons.append(f"supports float32, float64, bfloat16 and float16, got {str(w.dtype).removeprefix('torch.')}")
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        reasons.append("ONNX has no such operator")
    return reasons + [f"has no {name}" for name in form.beyond(FLAGS)]


def tssa(inputs: Inputs, form: Form) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w."""
    outputs: Tensors = _call("tssa", *_arguments(inputs, form))
    return outputs[0]


def tssa_(inputs: Inputs, form: Form) -> Tensor:
    """Overwrite w with y, and return it."""
    _call("tssa_", *_arguments(inputs, form))
    return inputs.w


def _arguments(inputs: Inputs, form: Form) -> tuple[Any, ...]:
    return (inputs.w, _temperature(inputs), inputs.mask, _cu_seqlens(inputs), *form.flags())


def causal_tssa(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    y, _, _, *sums = _call("causal_tssa", *_causal_arguments(inputs, form))
    return y, Sums(*sums)


def causal_tssa_(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Overwrite w with y, and return it with the sums after the last token."""
    sums = _call("causal_tssa_", *_causal_arguments(inputs, form))
    return inputs.w, Sums(*sums)


def _causal_arguments(inputs: Inputs, form: Form) -> tuple[Any, ...]:
    w, _, mask, bias, before, scale, decay, _ = inputs
    sums = before or (None, None, None)
    return (w, _temperature(inputs), bias, mask, *sums, scale, decay, _cu_seqlens(inputs), *form.flags())


def _temperature(inputs: Inputs) -> Tensor:
    given, dtype = inputs.temperature, statistics_dtype(inputs.w.dtype)
    return given if given.dtype == dtype else given.to(dtype)


def _cu_seqlens(inputs: Inputs) -> Tensor | None:
    return None if inputs.packing is None else inputs.packing.cu_seqlens


def _packing(cu_seqlens: Tensor | None, w: Tensor) -> Packing | None:
    return None if cu_seqlens is None else Packing(cu_seqlens, (1, w.shape[1]))


def _unfilled(w: Tensor, *shapes: tuple[int, ...]) -> Tensors:
    dtype, device = statistics_dtype(w.dtype), w.device
    return tuple([torch.empty(shape, dtype=dtype, device=device) for shape in shapes])


def _like_tokens(w: Tensor) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


def _sequences(w: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return how many sequences there are: B, or those that are packed into one row."""
    return w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _sums(w: Tensor, cu_seqlens: Tensor | None, flags: Sequence[int], *before: tuple[int, ...]) -> Tensors:
    """Return unfilled squares, weighted and mass, after others of the shapes `before`."""
    return _unfilled(w, *before, *sum_shapes(_sequences(w, cu_seqlens), w.shape[2], w.shape[3], Form.from_flags(flags)))


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _overwrite(w: Tensor, y: Tensor) -> None:
    """Make w hold y, which may be in its memory already, and let autograd know: others may have saved w."""
    if y is not w:
        w.copy_(y)
    torch.autograd.graph.increment_version(w)


def _run(
    name: str,
    flags: Sequence[int],
    cu_seqlens: Tensor | None,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    *strides: int,
) -> None:
    """Call the library with inputs, tokens first, and fill the outputs.

    All forms but the plain one, with or without fixed decays, are compiled for tokens in the dtype of their statistics.
    Others go through a copy, and so do gradients.
    """
    w = inputs[0]
    assert w is not None
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    wide = statistics_dtype(w.dtype)
    if w.dtype == wide or _is_plain(Form.from_flags(flags)):
        return _library.run(name, w, flags, cu_seqlens, (*inputs, *outputs), *strides)
    widened = [x.to(wide) if x is not None and x.dtype == w.dtype else x for x in inputs]
    filled = [torch.empty_like(x, dtype=wide) if x is not None and x.dtype == w.dtype else x for x in outputs]
    _library.run(name, w.to(wide), flags, cu_seqlens, (*widened, *filled), *strides)
    for x, y in zip(outputs, filled, strict=True):
        if x is not None and y is not None and x is not y:
            x.copy_(y)
    return None


def _is_plain(form: Form) -> bool:
    return form.block_size == 1 and not form.centered and not form.token_decay


_OPERATORS = torch.library.Library("tost", "FRAGMENT")  # type: ignore[no-untyped-call]
_KERNELS: dict[str, Callable[..., Any]] = {}
_RECORDERS: dict[str, Callable[..., Any]] = {}
# Without defaults: torch leaves trailing arguments out that equal them. Types are bool or int.
_FLAGS = ", ".join(f"{field.type} {field.name}" for field in fields(Form) if field.name in FLAGS)


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
    _OPERATORS.define(f"{name}({arguments}, {_FLAGS}) -> {outputs}")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"tost::{name}", fake, lib=_OPERATORS)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATORS.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
        _KERNELS[name] = function
        return function

    return register


def _call(name: str, *arguments: Any) -> Any:
    """Call ``tost::name``, past torch's dispatcher if that has nothing to add.

    It leads through C++ and back for each of its rules. Between two matrix products, when caches hold little else, that
    takes longer than the rest of a call in Python.
    """
    if torch.compiler.is_compiling() or is_observed(arguments):
        return getattr(torch.ops.tost, name).default(*arguments)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        return _RECORDERS[name](None, *arguments)
    return _KERNELS[name](*arguments)


def _differentiate(
    name: str,
    formulas: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Sequence[Tensor | None]] | None = None,
) -> None:
    """Register the derivatives of ``tost::name``.

    `torch.library.register_autograd` knows backward passes only: it drops forward-mode tangents without a word.

    Args:
        name: Name of the operator.
        formulas: The operator in differentiable PyTorch, for all that a backward pass cannot do.
        setup: Keeps what the backward pass needs: ``setup(ctx, arguments, outputs)``. None for operators that
            overwrite their input, which have no backward pass.
        backward: Returns the gradients of the tensors among the arguments, and None for the flags.
    """
    operator = getattr(torch.ops.tost, name).default

    def below(keys: Any, *arguments: Any) -> Any:
        if keys is None:  # the dispatcher was left out
            return _KERNELS[name](*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
            outputs = below(keys, *arguments)
            assert setup is not None
            setup(ctx, arguments, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
            assert backward is not None
            return (None, *backward(ctx, *cotangents))

    def run(keys: Any, *arguments: Any) -> Any:
        if transforms_active():
            return formulas(*arguments)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return below(keys, *arguments)
        return record(keys, *arguments)

    def record(keys: Any, *arguments: Any) -> Any:
        if setup is None:
            raise RuntimeError(f"tost::{name} overwrites its input, but autograd needs it for the backward pass.")
        return Recorded.apply(keys, *arguments)  # type: ignore[no-untyped-call]

    _RECORDERS[name] = record
    Recorded.__name__ = Recorded.__qualname__ = f"{name}_recorded"
    _OPERATORS.impl(name, run, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def _batch(name: str, returns: int, per_sequence: tuple[int, ...] = ()) -> None:
    """Register how ``tost::name`` runs under `torch.vmap`.

    Args:
        name: Name of the operator.
        returns: How many tensors it returns.
        per_sequence: Numbers of the arguments ``[B or 1, ...]``, tokens first, or ``[H]`` where all sequences share
            them. If nothing else is mapped over, the mapped dimension becomes a part of the batch; otherwise, and for
            packed sequences, the operator is called once for each entry.
    """
    operator = getattr(torch.ops.tost, name).default
    cu_seqlens = [argument.name for argument in operator._schema.arguments].index("cu_seqlens")

    def rule(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensors, tuple[int, ...]]:
        size = info.batch_size
        rows = dims[0] is not None and all(
            dim is None or (i in per_sequence and arguments[i].dim() > 2) for i, dim in enumerate(dims)
        )
        if rows and arguments[cu_seqlens] is None:
            batch = (size, arguments[0].movedim(dims[0], 0).shape[1])
            merged = [_merge(x, dims[i], batch) if i in per_sequence else x for i, x in enumerate(arguments)]
            outputs = tuple([x.unflatten(0, batch) for x in operator(*merged)])
        else:
            each = [
                operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)))
                for i in range(size)
            ]
            outputs = tuple([torch.stack(tensors) for tensors in zip(*each, strict=True)])
        return outputs, (0,) * returns

    torch.library.register_vmap(f"tost::{name}", rule, lib=_OPERATORS)


def _merge(x: Tensor | None, dim: int | None, batch: tuple[int, int]) -> Tensor | None:
    """Return x [B or 1, ...] for every entry and sequence of a mapped batch, with the mapped dimension at `dim`."""
    if x is None or (dim is None and (x.dim() == 1 or x.shape[0] == 1 != batch[1])):
        return x  # shared by all sequences
    x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
    return x.expand(*batch, *x.shape[2:]).flatten(0, 1)


# --- tssa


def _tssa_outputs(
    w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, *flags: int
) -> Tensors:
    """Return unfilled y, pi and the sums."""
    B, N, H, _ = w.shape
    return (_like_tokens(w), *_sums(w, cu_seqlens, flags, (B, N, H)))


def _tssa_gradients(dy: Tensor, w: Tensor, temperature: Tensor, *_: Any) -> Tensors:
    return _like_tokens(w), torch.empty_like(temperature)


@_operator("tssa", "Tensor w, Tensor temperature, Tensor? mask, Tensor? cu_seqlens", 5, _tssa_outputs)
def _tssa(w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, *flags: int) -> Tensors:
    outputs = _tssa_outputs(w, temperature, mask, cu_seqlens, *flags)
    _run("tost_tssa_forward", flags, cu_seqlens, _dense(w, temperature, mask), outputs)
    return outputs


@_operator("tssa_", "Tensor(a!) w, Tensor temperature, Tensor? mask, Tensor? cu_seqlens", 0, lambda *_: None)
def _tssa_inplace(w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, *flags: int) -> None:
    y = w.contiguous()
    _run("tost_tssa_forward", flags, cu_seqlens, (y, *_dense(temperature, mask)), (y, None, None, None, None))
    _overwrite(w, y)


@_operator(
    "tssa_backward",
    "Tensor dy, Tensor w, Tensor temperature, Tensor? mask, Tensor pi, Tensor squares, Tensor weighted, Tensor mass, "
    "Tensor? cu_seqlens",
    2,
    _tssa_gradients,
)
def _tssa_backward(dy: Tensor, w: Tensor, temperature: Tensor, mask: Tensor | None, *rest: Any) -> Tensors:
    saved, cu_seqlens, flags = rest[:4], rest[4], rest[5:]
    outputs = _tssa_gradients(dy, w, temperature)
    _run("tost_tssa_backward", flags, cu_seqlens, (*_dense(w, temperature, mask, dy), *saved), outputs)
    return outputs


def _tssa_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    w, temperature, mask, cu_seqlens, *ctx.flags = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, temperature, mask, *output[1:], cu_seqlens)


def _tssa_autograd(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (2 + len(ctx.flags))
    if dy is None:
        return (None, None, *rest)
    w, temperature, mask, *saved = ctx.saved_tensors
    dy = dy.to(w.dtype)
    if wants_graph():
        form, packing = Form.from_flags(ctx.flags), _packing(saved[-1], w)
        return (*pytorch.tssa_gradients(dy, w, temperature, mask, form, packing), *rest)
    return (*_call("tssa_backward", dy, w, temperature, mask, *saved, *ctx.flags), *rest)


def _tssa_formulas(
    w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, *flags: int
) -> Tensors:
    form = Form.from_flags(flags)
    if cu_seqlens is not None:  # y is all that is used
        inputs = Inputs(w, temperature, mask, packing=_packing(cu_seqlens, w))
        unused = _tssa_outputs(w, temperature, mask, cu_seqlens, *flags)[1:]
        return pytorch.tssa_formulas(inputs, form), *map(torch.zeros_like, unused)
    y, pi, squares, _, weighted, mass = pytorch.tssa_forward(w, temperature, mask, form)
    squares = torch.zeros_like(weighted[..., : w.shape[-1]]) if squares is None else squares
    if form.centered:  # the sums of the means are for the backward pass only
        weighted = torch.cat((weighted, torch.zeros_like(squares)), dim=-1)
    return y, pi, squares.squeeze(1), weighted.squeeze(1), mass.squeeze(1) - MASS_FLOOR


def _tssa_formulas_inplace(w: Tensor, *arguments: Any) -> None:
    w.copy_(_tssa_formulas(w, *arguments)[0])


_differentiate("tssa", _tssa_formulas, _tssa_setup, _tssa_autograd)
_differentiate("tssa_", _tssa_formulas_inplace)
_batch("tssa", 5, per_sequence=(0, 2))
_batch("tssa_backward", 2)


# --- causal_tssa


def _causal_outputs(w: Tensor, *arguments: Any) -> Tensors:
    """Return unfilled y, pi and starts, which only the backward pass needs, and the sums after the last token."""
    B, N, H, D = w.shape
    cu_seqlens, flags = arguments[8], arguments[9:]
    chunks = (N + _library.CAUSAL_CHUNK - 1) // _library.CAUSAL_CHUNK
    if cu_seqlens is not None:  # as many as there can be: all sequences but one may end in a chunk of their own
        chunks = N // _library.CAUSAL_CHUNK + cu_seqlens.shape[0] - 1
    per_chunk = sum(math.prod(shape) for shape in sum_shapes(1, H, D, Form.from_flags(flags)))
    starts = (B, chunks, per_chunk)
    return (_like_tokens(w), *_sums(w, cu_seqlens, flags, (B, N, H), starts))


def _stride(x: Tensor | None) -> int:
    """Numbers from one sequence's bias or scale to the next; 0 where all sequences share one."""
    return 0 if x is None or x.shape[0] == 1 else x.shape[1] * x.shape[2]


def _decays(decay: Tensor | None, w: Tensor, flags: Sequence[int]) -> Tensor | None:
    """Return the decays as the kernels take them: centered statistics fade by those of tokens."""
    fixed = decay is not None and decay.dim() == 1 and Form.from_flags(flags).centered
    return decay.expand(w.shape[:3]) if decay is not None and fixed else decay


def _run_causal(w: Tensor, arguments: tuple[Any, ...], outputs: tuple[Tensor | None, ...]) -> None:
    """Fill `outputs`: y, pi, starts and the sums; `arguments` are those of the operator after w."""
    temperature, bias, mask, squares, weighted, mass, scale, decay, cu_seqlens, *flags = arguments
    inputs = _dense(w, temperature, bias, mask, scale, _decays(decay, w, flags), squares, weighted, mass)
    _run("tost_causal_tssa_forward", flags, cu_seqlens, inputs, outputs, _stride(bias), _stride(scale))


_CAUSAL_ARGUMENTS = (
    "Tensor temperature, Tensor? bias, Tensor? mask, Tensor? squares, Tensor? weighted, Tensor? mass, "
    "Tensor? scale, Tensor? decay, Tensor? cu_seqlens"
)


@_operator("causal_tssa", f"Tensor w, {_CAUSAL_ARGUMENTS}", 6, _causal_outputs)
def _causal_tssa(w: Tensor, *arguments: Any) -> Tensors:
    outputs = _causal_outputs(w, *arguments)
    if arguments[8] is not None:
        outputs[2].zero_()  # packed sequences may have fewer chunks than there is room for
    _run_causal(w, arguments, outputs)
    return outputs


def _causal_sums(w: Tensor, *arguments: Any) -> Tensors:
    return _sums(w, arguments[8], arguments[9:])


@_operator("causal_tssa_", f"Tensor(a!) w, {_CAUSAL_ARGUMENTS}", 3, _causal_sums)
def _causal_tssa_inplace(w: Tensor, *arguments: Any) -> Tensors:
    y, after = w.contiguous(), _causal_sums(w, *arguments)
    _run_causal(y, arguments, (y, None, None, *after))
    _overwrite(w, y)
    return after


def _causal_gradients(*arguments: Any) -> Tensors:
    """Return unfilled dw, dtemperature, denergy [B, N, H], the gradients of the sums before, dscale [B, N, H], ddecay.

    The last two are empty where there is no scale, or no decay.
    """
    w, scale, decay, cu_seqlens, *flags = (arguments[4], *arguments[10:])
    B, N, H, _ = w.shape
    options = _unfilled(w, (0,) if scale is None else (B, N, H), (0,) if decay is None else decay.shape)
    return (_like_tokens(w), *_sums(w, cu_seqlens, flags, (H,), (B, N, H)), *options)


@_operator(
    "causal_tssa_backward",
    "Tensor dy, Tensor? dsquares, Tensor? dweighted, Tensor? dmass, Tensor w, Tensor temperature, Tensor? bias, "
    "Tensor? mask, Tensor pi, Tensor starts, Tensor? scale, Tensor? decay, Tensor? cu_seqlens",
    8,
    _causal_gradients,
)
def _causal_tssa_backward(*arguments: Any) -> Tensors:
    dy, dsquares, dweighted, dmass, w, temperature, bias, mask, pi, starts, scale, decay, cu_seqlens, *flags = arguments
    outputs, decays = _causal_gradients(*arguments), _decays(decay, w, flags)
    ddecays = outputs[-1] if decays is None else torch.empty_like(decays, memory_format=torch.contiguous_format)
    inputs = _dense(w, temperature, bias, mask, scale, decays, dy, dsquares, dweighted, dmass, pi, starts)
    filled = (*outputs[:-1], ddecays)
    _run("tost_causal_tssa_backward", flags, cu_seqlens, inputs, filled, _stride(bias), _stride(scale))
    if decay is not None:
        ddecays = ddecays.sum_to_size(decay.shape)
    return (*outputs[:-1], ddecays)


def _causal_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    w, temperature, bias, mask, *before, scale, decay, cu_seqlens = inputs[:10]
    ctx.flags = inputs[10:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, temperature, bias, mask, *output[1:3], scale, decay, cu_seqlens, *before)


def _causal_autograd(
    ctx: Any, dy: Tensor | None, dpi: None, dstarts: None, *dsums: Tensor | None
) -> tuple[Tensor | None, ...]:
    rest = (None,) * (1 + len(ctx.flags))
    if dy is None and all(x is None for x in dsums):
        return (*(None,) * 9, *rest)
    w, temperature, bias, mask, pi, starts, scale, decay, cu_seqlens, *before = ctx.saved_tensors
    dy = torch.zeros_like(w) if dy is None else dy.to(w.dtype)
    if wants_graph():
        arguments = (w, temperature, bias, mask, *before, scale, decay)
        return (*_causal_graph(ctx.flags, cu_seqlens, (dy, *dsums), arguments), *rest)
    dw, dtemperature, denergy, *dbefore, dscale, ddecay = _call(
        "causal_tssa_backward", dy, *dsums, w, temperature, bias, mask, pi, starts, scale, decay, cu_seqlens, *ctx.flags
    )
    return (
        dw,
        dtemperature,
        None if bias is None else (w.shape[-1] * denergy).sum_to_size(bias.shape),
        None,
        *((None, None, None) if before[0] is None else dbefore),
        None if scale is None else dscale.sum_to_size(scale.shape),
        None if decay is None else ddecay,
        *rest,
    )


def _start(w: Tensor, form: Form, cu_seqlens: Tensor | None, before: Sequence[Tensor | None]) -> Any:
    """Return the sums before the first token."""
    if before[0] is not None:
        return before
    return empty_sums(w.new_empty((_sequences(w, cu_seqlens), 0, *w.shape[2:])), form)


def _causal_graph(
    flags: Sequence[int],
    cu_seqlens: Tensor | None,
    cotangents: tuple[Tensor | None, ...],
    arguments: tuple[Any, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments, differentiable."""
    w, temperature, bias, mask, *before, scale, decay = arguments
    form = Form.from_flags(flags)
    start = _start(w, form, cu_seqlens, before)
    given = tuple([torch.zeros_like(x) if d is None else d for d, x in zip(cotangents, (w, *start), strict=True)])
    dw, dt, dbias, dscale, ddecay, *dbefore = pytorch.causal_gradients(
        given, (w, temperature, bias, scale, decay, *start), mask, form, _packing(cu_seqlens, w)
    )
    return (dw, dt, dbias, None, *((None, None, None) if before[0] is None else dbefore), dscale, ddecay)


def _causal_formulas(w: Tensor, temperature: Tensor, bias: Tensor | None, mask: Tensor | None, *rest: Any) -> Tensors:
    *before, scale, decay, cu_seqlens = rest[:6]
    form = Form.from_flags(rest[6:])
    start = _start(w, form, cu_seqlens, before)
    _, pi, starts, *_ = map(torch.zeros_like, _causal_outputs(w, temperature, bias, mask, *rest))
    packing = _packing(cu_seqlens, w)
    y, sums = pytorch.causal_formulas(Inputs(w, temperature, mask, bias, Sums(*start), scale, decay, packing), form)
    return (y, pi, starts, *sums)


def _causal_formulas_inplace(w: Tensor, *arguments: Any) -> Tensors:
    y, _, _, *sums = _causal_formulas(w, *arguments)
    w.copy_(y)
    return tuple(sums)


_differentiate("causal_tssa", _causal_formulas, _causal_setup, _causal_autograd)
_differentiate("causal_tssa_", _causal_formulas_inplace)
_batch("causal_tssa", 6, per_sequence=(0, 2, 3, 4, 5, 6, 7, 8))
_batch("causal_tssa_backward", 8)


# --- operations, for `torch.utils.flop_counter.FlopCounterMode`


def _chosen(form: Form) -> dict[str, Any]:
    return {field.name: getattr(form, field.name) for field in fields(OperatorOptions)}


def _tssa_flops(w: Any, temperature: Any, mask: Any, cu_seqlens: Any, *flags: Any, **_: Any) -> int:
    (B, N, H, D), form = w, Form.from_flags(flags)
    return int(B * N * tssa_flops(H, D, causal=False, **_chosen(form)))


def _causal_flops(w: Any, temperature: Any, bias: Any, mask: Any, *rest: Any, **_: Any) -> int:
    (B, N, H, D), options = w, _chosen(Form.from_flags(rest[6:]))
    per_token = tssa_flops(H, D, causal=True, bias=bias is not None, forget=rest[4] is not None, **options)
    return int(B * N * per_token)


def _tssa_backward_flops(dy: Any, w: Any, temperature: Any, mask: Any, *rest: Any, **_: Any) -> int:
    return 2 * _tssa_flops(w, temperature, mask, *rest[4:])


def _causal_backward_flops(*arguments: Any, **_: Any) -> int:
    return 2 * _causal_flops(*arguments[4:8], None, None, None, *arguments[10:])


register_flop_formula([torch.ops.tost.tssa, torch.ops.tost.tssa_])(_tssa_flops)
register_flop_formula([torch.ops.tost.causal_tssa, torch.ops.tost.causal_tssa_])(_causal_flops)
register_flop_formula(torch.ops.tost.tssa_backward)(_tssa_backward_flops)
register_flop_formula(torch.ops.tost.causal_tssa_backward)(_causal_backward_flops)
