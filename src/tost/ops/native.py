"""The operators by the native CPU kernels. Shapes are those of `tost.ops._operators`.

Starts, ``[B, chunks, F]``, have the three sums before every chunk, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from tost.ops import _library, pytorch
from tost.ops._inputs import GatedInputs, GatedResults, Inputs, Sums
from tost.ops._numerics import statistics_dtype
from tost.ops._operators import (
    SCHEMAS,
    argument_names,
    causal_arguments,
    causal_gradients,
    is_differentiated,
    like_tokens,
    register,
    run_causal,
    run_tssa,
    sequences,
    tssa_arguments,
    tssa_gradients,
    unfilled_sums,
)
from tost.ops._transforms import gradients, is_transformed, wants_graph
from tost.ops.form import FLAGS, Form
from tost.ops.packing import Packing
from tost.ops.state import gated_shapes, sum_shapes

Tensors = tuple[Tensor, ...]
unavailable = _library.unavailable  # called by the dispatcher for every backend
tssa = partial(run_tssa, "tssa")
causal_tssa = partial(run_causal, "causal_tssa")


def unsupported(w: Tensor, form: Form) -> list[str]:
    """Return why the native kernels cannot run on the tokens `w`."""
    reasons = []
    if w.dtype not in _library.TYPES:
        reasons.append(f"supports float32, float64, bfloat16 and float16, got {str(w.dtype).removeprefix('torch.')}")
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        reasons.append("ONNX has no such operator")
    return reasons


def tssa_(inputs: Inputs, form: Form) -> Tensor:
    """Overwrite w with y, and return it."""
    torch.ops.tost.tssa_.default(*tssa_arguments(inputs, form))
    return inputs.w


def causal_tssa_(inputs: Inputs) -> tuple[Tensor, Sums]:
    """Overwrite w with y, and return it with the sums after the last token."""
    sums = torch.ops.tost.causal_tssa_.default(*causal_arguments(inputs))
    return inputs.w, Sums(*sums)


def gated_tssa(inputs: GatedInputs) -> GatedResults:
    """Return y, and mean and covariance after the last token."""
    if is_transformed():
        return pytorch.gated_tssa(inputs)
    w, write, mask, mean, covariance, packing = inputs
    arguments = w.to(write.dtype), write, mask, mean, covariance, None if packing is None else packing.cu_seqlens
    if is_differentiated(arguments):
        return _Gated.apply(*arguments)  # type: ignore[no-untyped-call]
    return torch.ops.tost.gated_tssa.default(*arguments)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Tensor | None) -> Tensors:
        ctx.save_for_backward(*arguments)
        ctx.set_materialize_grads(False)
        return torch.ops.tost.gated_tssa.default(*arguments)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        w, write, mask, mean, covariance, cu_seqlens = saved = ctx.saved_tensors  # once, for checkpointing
        dy = torch.zeros_like(w) if dy is None else dy
        if wants_graph():
            packing = None if cu_seqlens is None else Packing(cu_seqlens, (1, w.shape[1]))
            shapes = _gated_state(w, write, cu_seqlens)
            given = [torch.zeros_like(x) if d is None else d for d, x in zip(dstate, shapes, strict=True)]

            def run(w: Tensor, write: Tensor, mean: Any, covariance: Any) -> GatedResults:
                return pytorch.gated_tssa(GatedInputs(w, write, mask, mean, covariance, packing))

            dw, dwrite, *before = gradients(run, (w, write, mean, covariance), (dy, *given))
            return dw, dwrite, None, *before, None
        operator = torch.ops.tost.gated_tssa_backward.default
        dw, dwrite, *before = operator(dy, *dstate, *saved)
        return dw, dwrite, None, *(before if mean is not None else (None, None)), None


# --- Checks. The public functions have checked their arguments, but the registered operators can be called by anyone.


def _check(operator: str, *arguments: Any) -> Form:
    """Return the form of a call; raise ValueError if the kernels cannot take these arguments."""
    *tensors, flags = arguments if "form" in SCHEMAS[operator] else (*arguments, Form().flags())
    return _checked(operator, tuple(flags), *[None if x is None else (x.shape, x.dtype) for x in tensors])


_SUMS = ("squares", "weighted", "mass")


@lru_cache(maxsize=4096)
def _checked(operator: str, flags: tuple[int, ...], *given: tuple[torch.Size, torch.dtype] | None) -> Form:
    names = [name for name in argument_names(SCHEMAS[operator]) if name != "form"]
    found = {name: x for name, x in zip(names, given, strict=True) if x is not None}

    def refuse(problem: str) -> NoReturn:
        raise ValueError(f"tost::{operator}: {problem}. Call the function of tost of the same name instead.")

    if missing := [name for name in names if name not in found and f"Tensor? {name}" not in SCHEMAS[operator]]:
        refuse(f"it needs {', '.join(missing)}, got None")
    shape, dtype, wide = tuple(found["w"][0]), found["w"][1], statistics_dtype(found["w"][1])
    types = (torch.float32, torch.float64) if "write" in found else tuple(_library.TYPES)
    if len(shape) != 4 or 0 in shape[2:] or dtype not in types:
        refuse(f"w has shape {shape} and dtype {dtype}; it needs floating point tokens [B, N, H, D]")
    B, N, H, D = shape
    g = flags[0] if len(flags) == len(FLAGS) else 0
    if "write" in found:
        blocks = (0, *found["write"][0])[-1]
        g = D // blocks if blocks and D % blocks == 0 else 0
    if not 1 <= g <= D or D % g or flags[-1] not in (0, 1):
        refuse(f"it needs {', '.join(FLAGS)} with blocks that divide {D} features, got {flags} and blocks of {g}")
    S = B if "cu_seqlens" not in found else found["cu_seqlens"][0].numel() - 1
    packed, sums = "cu_seqlens" in found, sum_shapes(S, H, D, g)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        **dict.fromkeys(("w", "dy"), (shape,)),
        "write": ((B, N, H, D // g),),
        "temperature": ((H,),),
        "mask": ((B, N),),
        "cu_seqlens": ((S + 1,),),
        "bias": ((B, N, H), (1, N, H)),
        "pi": ((B, N, H),),
        "starts": (_starts_shape(shape, S, packed),),
        **{f"{d}{name}": (x,) for name, x in zip(_SUMS, sums, strict=True) for d in ("", "d")},
    }
    mean, covariance, _ = gated_shapes(S, H, D, g)
    shapes |= dict.fromkeys(("covariance", "dcovariance_out"), (covariance,)) | dict.fromkeys(("dmean_out",), (mean,))
    if "write" in found:
        shapes["mean"] = (mean,)
    dtypes = {"w": dtype, "dy": dtype, "mask": torch.bool, "cu_seqlens": torch.int64}
    for name, (size, kind) in found.items():
        if size not in shapes[name] or kind != dtypes.get(name, wide):
            refuse(
                f"{name} has shape {tuple(size)} and dtype {kind}, but w has shape {shape} and dtype {dtype}; "
                f"it needs {dtypes.get(name, wide)} of shape {' or '.join(map(str, shapes[name]))}"
            )
    if packed and (B != 1 or S < 0):
        refuse(f"cu_seqlens describes one row of at least 0 sequences, but w has {B} rows")
    before = {"mean", "covariance"} if "write" in found else {*_SUMS}
    if 0 < len(found.keys() & before) < len(before):
        refuse("a part of the state before the first token is missing")
    return Form.from_flags(flags)


def _starts_shape(shape: Sequence[int], num_sequences: int, packed: bool) -> tuple[int, ...]:
    B, N, H, D = shape
    chunks = (N + _library.CAUSAL_CHUNK - 1) // _library.CAUSAL_CHUNK
    if packed:  # as many as there can be: all sequences but one may end in a chunk of their own
        chunks = N // _library.CAUSAL_CHUNK + num_sequences
    return B, chunks, sum(math.prod(size) for size in sum_shapes(1, H, D))


# --- Kernels


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _overwrite(w: Tensor, y: Tensor) -> None:
    """Make w hold y, which may be in its memory already, and let autograd know: others may have saved w."""
    if y is not w:
        w.copy_(y)
    torch.autograd.graph.increment_version(w)


def _widened(x: Tensor, form: Form) -> Tensor:
    """Return tokens in a type that is compiled for the form: blocks take statistics' own."""
    return x.to(statistics_dtype(x.dtype)) if form.block_size > 1 else x


def _tssa_outputs(w: Tensor, temperature: Tensor, mask: Any, cu_seqlens: Tensor | None, form: Any) -> Tensors:
    """Return unfilled y, pi and the sums."""
    block_size = Form.from_flags(form).block_size
    return like_tokens(w), *unfilled_sums(w, cu_seqlens, w.shape[:3], block_size=block_size)


def _tssa(w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, flags: list[int]) -> Tensors:
    form = _check("tssa", w, temperature, mask, cu_seqlens, flags)
    tokens = _widened(w, form)
    y, *rest = _tssa_outputs(tokens, temperature, mask, cu_seqlens, flags)
    _library.run("tost_tssa_forward", form.flags(), cu_seqlens, _dense(tokens, temperature, mask), (y, *rest))
    return y.to(w.dtype), *rest


def _tssa_inplace(w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Any, flags: list[int]) -> None:
    form = _check("tssa_", w, temperature, mask, cu_seqlens, flags)
    y, outputs = _widened(w, form).contiguous(), (None, None, None, None)
    _library.run("tost_tssa_forward", form.flags(), cu_seqlens, (y, *_dense(temperature, mask)), (y, *outputs))
    _overwrite(w, y)


def _tssa_backward(dy: Tensor, w: Tensor, temperature: Tensor, mask: Tensor | None, *rest: Any) -> Tensors:
    form = _check("tssa_backward", dy, w, temperature, mask, *rest)
    tokens, gradient = _widened(w, form), _widened(dy, form)
    dw, dtemperature = tssa_gradients(gradient, tokens, temperature)
    inputs = _dense(tokens, temperature, mask, gradient, *rest[:4])
    _library.run("tost_tssa_backward", form.flags(), rest[4], inputs, (dw, dtemperature))
    return dw.to(w.dtype), dtemperature


def _causal_outputs(w: Tensor, *arguments: Any) -> Tensors:
    """Return unfilled y, pi and starts, which only the backward pass needs, and the sums after the last token."""
    cu_seqlens = arguments[-1]
    starts = _starts_shape(w.shape, sequences(w, cu_seqlens), cu_seqlens is not None)
    return like_tokens(w), *unfilled_sums(w, cu_seqlens, w.shape[:3], starts)


def _causal_sums(w: Tensor, *arguments: Any) -> Tensors:
    return unfilled_sums(w, arguments[-1])


def _stride(bias: Tensor | None) -> int:
    """Numbers from one sequence's bias to the next; 0 where all sequences share one."""
    return 0 if bias is None or bias.shape[0] == 1 else bias.shape[1] * bias.shape[2]


def _run_causal(w: Tensor, arguments: Sequence[Any], outputs: tuple[Tensor | None, ...]) -> None:
    """Fill `outputs`: y, pi, starts and the sums; `arguments` are those of the operator after w."""
    temperature, bias, *rest, cu_seqlens = arguments
    inputs = _dense(w, temperature, bias, *rest)
    _library.run("tost_causal_tssa_forward", (), cu_seqlens, inputs, outputs, _stride(bias))


def _causal_tssa(w: Tensor, *arguments: Any) -> Tensors:
    _check("causal_tssa", w, *arguments)
    outputs = _causal_outputs(w, *arguments)
    if arguments[-1] is not None:
        outputs[2].zero_()  # packed sequences may have fewer chunks than there is room for
    _run_causal(w, arguments, outputs)
    return outputs


def _causal_tssa_inplace(w: Tensor, *arguments: Any) -> Tensors:
    _check("causal_tssa_", w, *arguments)
    y, after = w.contiguous(), _causal_sums(w, *arguments)
    _run_causal(y, arguments, (y, None, None, *after))
    _overwrite(w, y)
    return after


def _causal_tssa_backward(*arguments: Any) -> Tensors:
    dy, *dsums, w, temperature, bias, mask, pi, starts, cu_seqlens = arguments
    _check("causal_tssa_backward", *arguments)
    outputs = causal_gradients(*arguments)
    inputs = _dense(w, temperature, bias, mask, dy, *dsums, pi, starts)
    _library.run("tost_causal_tssa_backward", (), cu_seqlens, inputs, outputs, _stride(bias))
    return outputs


def _gated_state(w: Tensor, write: Tensor, cu_seqlens: Tensor | None) -> Tensors:
    """Return an unfilled mean and covariance."""
    _, _, H, D = w.shape
    mean, covariance, _ = gated_shapes(sequences(w, cu_seqlens), H, D, D // write.shape[3])
    return w.new_empty(mean), w.new_empty(covariance)


def _gated_outputs(w: Tensor, write: Tensor, *rest: Any) -> Tensors:
    """Return unfilled y, and mean and covariance after the last token."""
    return like_tokens(w), *_gated_state(w, write, rest[-1])


def _gated_gradients(*arguments: Any) -> Tensors:
    """Return unfilled gradients of the tokens, the gates and the state before."""
    w, write, *_, cu_seqlens = arguments[3:]
    return like_tokens(w), like_tokens(write), *_gated_state(w, write, cu_seqlens)


def _gated(w: Tensor, write: Tensor, *rest: Tensor | None) -> Tensors:
    _check("gated_tssa", w, write, *rest)
    outputs, block_size = _gated_outputs(w, write, *rest), w.shape[3] // write.shape[3]
    _library.run("tost_gated_forward", (block_size,), rest[-1], _dense(w, write, *rest[:-1]), outputs)
    return outputs


def _gated_backward(*arguments: Any) -> Tensors:
    _check("gated_tssa_backward", *arguments)
    dy, dmean_out, dcovariance_out, w, write, *rest, cu_seqlens = arguments
    outputs, block_size = _gated_gradients(*arguments), w.shape[3] // write.shape[3]
    inputs = _dense(w, write, *rest, dy, dmean_out, dcovariance_out)
    _library.run("tost_gated_backward", (block_size,), cu_seqlens, inputs, outputs)
    return outputs


def _no_outputs(*_: Any) -> None:
    return None


register("tssa", _tssa, _tssa_outputs, 5)
register("tssa_", _tssa_inplace, _no_outputs, 0)
register("tssa_backward", _tssa_backward, tssa_gradients, 2)
register("causal_tssa", _causal_tssa, _causal_outputs, 6)
register("causal_tssa_", _causal_tssa_inplace, _causal_sums, 3)
register("causal_tssa_backward", _causal_tssa_backward, causal_gradients, 6)
register("gated_tssa", _gated, _gated_outputs, 3)
register("gated_tssa_backward", _gated_backward, _gated_gradients, 4)
