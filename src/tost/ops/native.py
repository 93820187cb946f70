"""Both operators by the native CPU kernels. Shapes are those of `tost.ops._operators`.

Starts, ``[B, chunks, F]``, have the three sums before every chunk, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost.ops import _library, pytorch
from tost.ops._blocks import packed_width
from tost.ops._inputs import GatedInputs, GatedResults, Inputs, Sums
from tost.ops._numerics import statistics_dtype
from tost.ops._operators import (
    SCHEMAS,
    argument_names,
    causal_arguments,
    causal_gradients,
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
from tost.ops.state import sum_shapes

Tensors = tuple[Tensor, ...]
unavailable = _library.unavailable  # called by the dispatcher for every backend
tssa = partial(run_tssa, "tssa")
causal_tssa = partial(run_causal, "causal_tssa")


def unsupported(w: Tensor, form: Form) -> list[str]:
    """Return why the native kernels cannot run on the tokens `w`, or in this form."""
    reasons = []
    if w.dtype not in _library.TYPES:
        reasons.append(f"supports float32, float64, bfloat16 and float16, got {str(w.dtype).removeprefix('torch.')}")
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        reasons.append("ONNX has no such operator")
    return reasons + [f"has no {name}" for name in form.beyond(FLAGS)]


def tssa_(inputs: Inputs, form: Form) -> Tensor:
    """Overwrite w with y, and return it."""
    torch.ops.tost.tssa_.default(*tssa_arguments(inputs, form))
    return inputs.w


def causal_tssa_(inputs: Inputs, form: Form) -> tuple[Tensor, Sums]:
    """Overwrite w with y, and return it with the sums after the last token."""
    sums = torch.ops.tost.causal_tssa_.default(*causal_arguments(inputs, form))
    return inputs.w, Sums(*sums)


def gated_tssa(inputs: GatedInputs) -> GatedResults:
    """Return mean and step of every token, and mean and covariance after the last one."""
    if is_transformed():
        return pytorch.gated_tssa(inputs)
    w, write, mask, mean, covariance, packing = inputs
    cu_seqlens = None if packing is None else packing.cu_seqlens
    return _Gated.apply(w.to(write.dtype), write, mask, mean, covariance, cu_seqlens)  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Tensor | None) -> Tensors:
        ctx.save_for_backward(*arguments)
        return torch.ops.tost.gated_tssa.default(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients_of: Tensor) -> tuple[Tensor | None, ...]:
        w, write, mask, mean, covariance, cu_seqlens = ctx.saved_tensors
        if wants_graph():
            packing = None if cu_seqlens is None else Packing(cu_seqlens, (1, w.shape[1]))

            def run(w: Tensor, write: Tensor, mean: Any, covariance: Any) -> GatedResults:
                return pytorch.gated_tssa(GatedInputs(w, write, mask, mean, covariance, packing))

            dw, dwrite, *before = gradients(run, (w, write, mean, covariance), gradients_of)
            return dw, dwrite, None, *before, None
        dw, dwrite, *before = torch.ops.tost.gated_tssa_backward.default(*gradients_of, *ctx.saved_tensors)
        return dw, dwrite, None, *(before if mean is not None else (None, None)), None


# --- Checks. The public functions have checked their arguments, but the registered operators can be called by anyone.


class _Plan(NamedTuple):
    """A legal call: its form, and the shapes of the statistics that a forward pass returns."""

    form: Form
    shapes: tuple[tuple[int, ...], ...]

    def outputs(self, w: Tensor) -> Tensors:
        """Return them unfilled."""
        dtype, device = statistics_dtype(w.dtype), w.device
        return tuple([torch.empty(shape, dtype=dtype, device=device) for shape in self.shapes])


def _check(operator: str, *arguments: Any) -> _Plan:
    """Return the plan of a call of an operator; raise ValueError if the kernels cannot take these arguments."""
    *tensors, form = arguments
    return _plan(operator, tuple(form), *[None if x is None else (x.shape, x.dtype) for x in tensors])


@lru_cache(maxsize=4096)
def _plan(operator: str, flags: tuple[int, ...], *given: tuple[torch.Size, torch.dtype] | None) -> _Plan:
    names = argument_names(SCHEMAS[operator])[:-1]
    found = {name: x for name, x in zip(names, given, strict=True) if x is not None}
    shape, dtype, causal = tuple(found["w"][0]), found["w"][1], "causal" in operator

    def refuse(problem: str) -> None:
        raise ValueError(f"tost::{operator}: {problem}. Call tost.tssa or tost.causal_tssa_with_state instead.")

    if len(shape) != 4 or 0 in shape[2:] or dtype not in _library.TYPES:
        refuse(f"w has shape {shape} and dtype {dtype}; it needs floating point tokens [B, N, H, D]")
    B, N, H, D = shape
    limits = [range(2)] * len(FLAGS)
    limits[FLAGS.index("block_size")] = range(1, D + 1)
    if len(flags) != len(FLAGS) or not all(x in limit for x, limit in zip(flags, limits, strict=True)):
        refuse(f"form is {flags}; it needs {', '.join(FLAGS)}, where block_size is from 1 to {D} and the others 0 or 1")
    form = Form.from_flags(flags)
    if D % form.block_size or form.channel_decay > form.token_decay or (form.token_decay and "decay" not in found):
        refuse(f"form is {form}; blocks divide the {D} features, and a decay of tokens comes with the tensor")
    S = B if "cu_seqlens" not in found else found["cu_seqlens"][0].numel() - 1
    K, sums = form.num_masses(D), dict(zip(("squares", "weighted", "mass"), sum_shapes(S, H, D, form), strict=True))
    per_token = [(B, N, H), (1, N, H)]
    decay = [(B, N, H, K)] if form.channel_decay else [(B, N, H)] if form.token_decay else [(H,)]
    needed: dict[str, list[Any]] = {
        "w": [shape],
        "dy": [shape],
        "temperature": [(H,)],
        "mask": [(B, N)],
        "cu_seqlens": [(S + 1,)],
    }
    needed |= {"bias": per_token, "scale": per_token, "decay": decay, "pi": per_token[:1]}
    needed |= {f"{prefix}{name}": [x] for name, x in sums.items() for prefix in ("", "d")}
    needed["starts"] = [_starts_shape(shape, S, "cu_seqlens" in found, form)]
    dtypes = {"w": dtype, "dy": dtype, "mask": torch.bool, "cu_seqlens": torch.int64}
    for name, (size, kind) in found.items():
        if size not in needed[name] or kind != dtypes.get(name, statistics_dtype(dtype)):
            wanted = " or ".join(map(str, needed[name]))
            refuse(
                f"{name} has shape {tuple(size)} and dtype {kind}, but w has shape {shape} and dtype {dtype}; "
                f"it needs {dtypes.get(name, statistics_dtype(dtype))} of shape {wanted}"
            )
    if "cu_seqlens" in found and (B != 1 or S < 0):
        refuse(f"cu_seqlens describes one row of at least 0 sequences, but w has {B} rows")
    if causal and "dy" not in found and len(found.keys() & sums.keys()) not in (0, 3):
        refuse("of the three sums before the first token some are missing")
    if not causal and (form.token_decay or form.channel_decay):
        refuse("only the causal operators have a decay")
    shapes = list(sums.values())
    if operator in ("tssa", "causal_tssa"):
        shapes = [(B, N, H), *needed["starts"] * causal, *shapes]
    return _Plan(form, tuple(shapes))


def _starts_shape(shape: Sequence[int], num_sequences: int, packed: bool, form: Form) -> tuple[int, ...]:
    B, N, H, D = shape
    chunks = (N + _library.CAUSAL_CHUNK - 1) // _library.CAUSAL_CHUNK
    if packed:  # as many as there can be: all sequences but one may end in a chunk of their own
        chunks = N // _library.CAUSAL_CHUNK + num_sequences
    return B, chunks, sum(math.prod(size) for size in sum_shapes(1, H, D, form))


# --- Kernels


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _overwrite(w: Tensor, y: Tensor) -> None:
    """Make w hold y, which may be in its memory already, and let autograd know: others may have saved w."""
    if y is not w:
        w.copy_(y)
    torch.autograd.graph.increment_version(w)


def _tssa_outputs(w: Tensor, temperature: Tensor, mask: Any, cu_seqlens: Tensor | None, form: Any) -> Tensors:
    """Return unfilled y, pi and the sums."""
    return like_tokens(w), *unfilled_sums(w, cu_seqlens, Form.from_flags(form), w.shape[:3])


def _tssa(w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, flags: list[int]) -> Tensors:
    plan = _check("tssa", w, temperature, mask, cu_seqlens, flags)
    outputs = like_tokens(w), *plan.outputs(w)
    _library.run("tost_tssa_forward", plan.form, cu_seqlens, _dense(w, temperature, mask), outputs)
    return outputs


def _tssa_inplace(w: Tensor, temperature: Tensor, mask: Tensor | None, cu_seqlens: Any, flags: list[int]) -> None:
    form, y = _check("tssa_", w, temperature, mask, cu_seqlens, flags).form, w.contiguous()
    _library.run("tost_tssa_forward", form, cu_seqlens, (y, *_dense(temperature, mask)), (y, None, None, None, None))
    _overwrite(w, y)


def _tssa_backward(dy: Tensor, w: Tensor, temperature: Tensor, mask: Tensor | None, *rest: Any) -> Tensors:
    form = _check("tssa_backward", dy, w, temperature, mask, *rest).form
    outputs = tssa_gradients(dy, w, temperature)
    _library.run("tost_tssa_backward", form, rest[4], _dense(w, temperature, mask, dy, *rest[:4]), outputs)
    return outputs


def _causal_outputs(w: Tensor, *arguments: Any) -> Tensors:
    """Return unfilled y, pi and starts, which only the backward pass needs, and the sums after the last token."""
    *_, cu_seqlens, flags = arguments
    form = Form.from_flags(flags)
    starts = _starts_shape(w.shape, sequences(w, cu_seqlens), cu_seqlens is not None, form)
    return like_tokens(w), *unfilled_sums(w, cu_seqlens, form, w.shape[:3], starts)


def _causal_sums(w: Tensor, *arguments: Any) -> Tensors:
    return unfilled_sums(w, arguments[-2], Form.from_flags(arguments[-1]))


def _stride(x: Tensor | None) -> int:
    """Numbers from one sequence's bias or scale to the next; 0 where all sequences share one."""
    return 0 if x is None or x.shape[0] == 1 else x.shape[1] * x.shape[2]


def _decays(decay: Tensor | None, w: Tensor, form: Form) -> Tensor | None:
    """Return the decays as the kernels take them: centered statistics fade by decays of tokens."""
    return decay.expand(w.shape[:3]) if decay is not None and decay.dim() == 1 and form.centered else decay


def _run_causal(w: Tensor, form: Form, arguments: Sequence[Any], outputs: tuple[Tensor | None, ...]) -> None:
    """Fill `outputs`: y, pi, starts and the sums; `arguments` are those of the operator after w."""
    temperature, bias, mask, *before, scale, decay, cu_seqlens, _ = arguments
    inputs = _dense(w, temperature, bias, mask, scale, _decays(decay, w, form), *before)
    _library.run("tost_causal_tssa_forward", form, cu_seqlens, inputs, outputs, _stride(bias), _stride(scale))


def _causal_tssa(w: Tensor, *arguments: Any) -> Tensors:
    plan = _check("causal_tssa", w, *arguments)
    outputs = like_tokens(w), *plan.outputs(w)
    if arguments[-2] is not None:
        outputs[2].zero_()  # packed sequences may have fewer chunks than there is room for
    _run_causal(w, plan.form, arguments, outputs)
    return outputs


def _causal_tssa_inplace(w: Tensor, *arguments: Any) -> Tensors:
    plan, y = _check("causal_tssa_", w, *arguments), w.contiguous()
    after = plan.outputs(w)
    _run_causal(y, plan.form, arguments, (y, None, None, *after))
    _overwrite(w, y)
    return after


def _causal_tssa_backward(*arguments: Any) -> Tensors:
    dy, *dsums, w, temperature, bias, mask, pi, starts, scale, decay, cu_seqlens, _ = arguments
    form = _check("causal_tssa_backward", *arguments).form
    outputs, decays = causal_gradients(*arguments), _decays(decay, w, form)
    ddecays = outputs[-1] if decays is None else torch.empty_like(decays, memory_format=torch.contiguous_format)
    inputs = _dense(w, temperature, bias, mask, scale, decays, dy, *dsums, pi, starts)
    filled = (*outputs[:-1], ddecays)
    _library.run("tost_causal_tssa_backward", form, cu_seqlens, inputs, filled, _stride(bias), _stride(scale))
    return (*outputs[:-1], ddecays if decay is None else ddecays.sum_to_size(decay.shape))


def _no_outputs(*_: Any) -> None:
    return None


register("tssa", _tssa, _tssa_outputs, 5)
register("tssa_", _tssa_inplace, _no_outputs, 0)
register("tssa_backward", _tssa_backward, tssa_gradients, 2)
register("causal_tssa", _causal_tssa, _causal_outputs, 6)
register("causal_tssa_", _causal_tssa_inplace, _causal_sums, 3)
register("causal_tssa_backward", _causal_tssa_backward, causal_gradients, 8)


def _gated_shapes(w: Tensor, write: Tensor, cu_seqlens: Tensor | None) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the block size and the shapes of a state."""
    (_, _, H, D), S, g = w.shape, sequences(w, cu_seqlens), w.shape[3] // write.shape[3]
    return g, (S, H, D), (S, H, packed_width(D, g))


def _gated_outputs(w: Tensor, write: Tensor, *rest: Any) -> Tensors:
    """Return unfilled mean and step, and mean and covariance after the last token."""
    return like_tokens(w), like_tokens(w), *map(w.new_empty, _gated_shapes(w, write, rest[-1])[1:])


def _gated_gradients(*arguments: Any) -> Tensors:
    """Return unfilled gradients of the tokens, the gates and the state before."""
    w, write, *_, cu_seqlens = arguments[4:]
    return like_tokens(w), like_tokens(write), *map(w.new_empty, _gated_shapes(w, write, cu_seqlens)[1:])


def _gated(w: Tensor, write: Tensor, *rest: Tensor | None) -> Tensors:
    _check_gated("gated_tssa", w, write, *rest)
    outputs = _gated_outputs(w, write, *rest)
    g = w.shape[3] // write.shape[3]
    _library.run_gated("tost_gated_forward", g, rest[-1], _dense(w, write, *rest[:-1]), outputs)
    return outputs


def _gated_backward(*arguments: Any) -> Tensors:
    dmean, dstep, dmean_out, dcovariance_out, w, write, *rest = arguments
    _check_gated("gated_tssa_backward", w, write, *rest)
    outputs = _gated_gradients(*arguments)
    inputs = _dense(w, write, *rest[:-1], dmean, dstep, dmean_out, dcovariance_out)
    _library.run_gated("tost_gated_backward", w.shape[3] // write.shape[3], rest[-1], inputs, outputs)
    return outputs


def _check_gated(operator: str, w: Tensor, write: Tensor, *rest: Tensor | None) -> None:
    """Raise ValueError if the kernels cannot take these arguments."""
    mask, mean, covariance, cu_seqlens = rest
    B, N, H, D = w.shape if w.dim() == 4 else (0, 0, 0, 0)
    K = write.shape[-1] if write.dim() == 4 else 0
    _, state, products = _gated_shapes(w, write, cu_seqlens) if D * K else (0, (), ())
    fits = D * K > 0 and D % K == 0 and write.shape == (B, N, H, K) and w.dtype in (torch.float32, torch.float64)
    fits &= mask is None or (mask.shape == (B, N) and mask.dtype == torch.bool)
    fits &= (mean is None) == (covariance is None)
    fits &= mean is None or covariance is None or (mean.shape == state and covariance.shape == products)
    fits &= cu_seqlens is None or (B == 1 and cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int64)
    fits &= all(x is None or x.dtype == w.dtype for x in (write, mean, covariance))
    if not fits:
        shapes = [None if x is None else (*x.shape, x.dtype) for x in (w, write, *rest)]
        raise ValueError(
            f"tost::{operator}: w, write, mask, mean, covariance and cu_seqlens are {shapes}; w is float32 or float64 "
            "[B, N, H, D], the others belong to it. Call tost.gated_tssa_with_state instead."
        )


register("gated_tssa", _gated, _gated_outputs, 4)
register("gated_tssa_backward", _gated_backward, _gated_gradients, 4)
