"""Cross-entropy of a large vocabulary without its logits.

Logits and their gradient take 2 V numbers per token, more than all layers of a small model together. Here they exist
for a few tokens at a time: the gradients of features and weight are made together with the loss, and no logit is kept.

Shapes: x [..., C] (tokens of width C), weight [V, C] with vocabulary V, targets [...]; T tokens in total.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tost.ops._numerics import statistics_dtype
from tost.ops._transforms import gradients, has_values, is_transformed, wants_graph

# Logits in a chunk: 64 MiB in float32, and enough tokens to keep a matrix product busy at any vocabulary in use.
_CHUNK_NUMEL = 1 << 24
_ROWS = 1024


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Return the cross-entropy in nats of logits ``x @ weight^T``.

    It is ``F.cross_entropy(F.linear(x, weight).float(), targets)`` in value and in both gradients, in the same time.
    Sums over tokens and over the vocabulary are taken in float32, or in float64 for float64 tokens; in a reduced
    precision, that of autocast too, only the matrix products are. The gradients are ready when the loss is, so
    computing it is the larger part of the work; without gradients they are left out.

    Args:
        x: Features, ``[..., C]``.
        weight: Output layer, ``[V, C]``.
        targets: Classes, int64 ``[...]``.
        ignore_index: A target that does not count.
        reduction: ``"mean"`` over the targets that count, 0 if none does; or ``"sum"``.
        chunk_size: Tokens whose logits exist at the same time; None for 64 MiB of them in float32.

    Returns:
        A scalar, float32, or float64 for float64 tokens.

    Raises:
        ValueError: The shapes do not fit, a target is not in the vocabulary, or an option is unknown.

    Example:
        >>> import torch
        >>> from tost.nn import linear_cross_entropy
        >>> x, weight = torch.randn(2, 10, 64), torch.zeros(50304, 64)
        >>> loss = linear_cross_entropy(x, weight, torch.randint(50304, (2, 10)))
        >>> round(loss.item(), 4)  # log 50304
        10.8258
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} is not known; it takes 'mean' or 'sum'.")
    _check(x, weight, targets, ignore_index)
    rows = max(1, _CHUNK_NUMEL // max(1, len(weight))) if chunk_size is None else chunk_size
    if rows < 1:
        raise ValueError(f"chunk_size={chunk_size} takes no token; use at least 1, or None.")
    flat = targets.reshape(-1)
    features, precision = x.reshape(-1, x.shape[-1]), _precision(x)
    if is_transformed():
        total = _with_all_logits(features, weight, flat, ignore_index, precision)
    else:
        total = _LinearCrossEntropy.apply(features, weight, flat, ignore_index, rows, precision)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else total / (flat != ignore_index).sum().clamp_min(1)


def _check(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> None:
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or targets.shape != x.shape[:-1]:
        raise ValueError(
            f"features of shape {tuple(x.shape)}, a weight of shape {tuple(weight.shape)} and targets of shape "
            f"{tuple(targets.shape)} do not fit; they need shapes [..., C], [V, C] and [...]."
        )
    if not has_values(targets):
        return
    if bool(((targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))).any()):
        raise ValueError(
            f"targets reach from {int(targets.min())} to {int(targets.max())}, but there are {len(weight)} classes, "
            f"from 0 to {len(weight) - 1}; use {ignore_index} for those that do not count."
        )


def _precision(x: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products, from x or autocast."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _with_all_logits(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, precision: torch.dtype) -> Tensor:
    """Return the sum over tokens, differentiable in every way."""
    logits = F.linear(x.to(precision), weight.to(precision)).to(statistics_dtype(x.dtype))
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, rows: int, precision: torch.dtype
    ) -> Tensor:
        wide = statistics_dtype(x.dtype)
        low_x, low_weight = x.to(precision), weight.to(precision)
        total = torch.zeros((), dtype=wide, device=x.device)
        d_x = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros(weight.shape, dtype=wide, device=x.device) if ctx.needs_input_grad[1] else None
        # Memory of its own for each piece would have to be mapped again and again, which takes longer than filling it.
        memory = x.new_empty(min(rows, len(x)), len(weight), dtype=wide)
        low_memory = memory if precision == wide else torch.empty_like(memory, dtype=precision)
        for begin in range(0, len(x), rows):
            piece = slice(begin, begin + rows)
            low_logits, logits = (each[: len(targets[piece])] for each in (low_memory, memory))
            torch.mm(low_x[piece], low_weight.t(), out=low_logits)
            if precision != wide:
                logits.copy_(low_logits)
            total += _entropy_(logits, targets[piece], ignore_index)
            if d_x is None and d_weight is None:
                continue
            residue = _residue_(logits, targets[piece], ignore_index)
            residue = residue if precision == wide else low_logits.copy_(residue)
            if d_x is not None:
                d_x[piece] = residue @ low_weight
            if d_weight is not None:
                _add_product_(d_weight, residue.t(), low_x[piece])
        ctx.save_for_backward(d_x, d_weight, x, weight, targets)
        ctx.options = (ignore_index, precision)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *found, x, weight, targets = ctx.saved_tensors
        if wants_graph():
            run = partial(_with_all_logits, targets=targets, ignore_index=ctx.options[0], precision=ctx.options[1])
            return (*gradients(run, (x, weight), grad), None, None, None, None)
        d_x, d_weight = (None if each is None else _scaled(each, grad) for each in found)
        return d_x, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product of a and b to a total that may be of higher precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
        return
    rows = len(total) if torch.compiler.is_compiling() or total.device.type != "cpu" else _ROWS
    for part, addend in zip(torch.split(total, rows), torch.split(a @ b, rows), strict=True):
        part += addend  # torch widens the addend in memory: in small parts, which stay in the cache


def _entropy_(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the summed cross-entropy of logits [R, V], and leave their softmax in their place."""
    counted = targets != ignore_index
    logits -= logits.amax(dim=1, keepdim=True)
    picked = logits.gather(1, targets.where(counted, 0).unsqueeze(1)).squeeze(1)
    mass = logits.exp_().sum(dim=1)
    logits /= mass.unsqueeze(1)
    return (mass.log() - picked).where(counted, 0).sum()


def _residue_(softmax: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Turn the softmax [R, V] into the gradient of the summed cross-entropy by the logits, in place."""
    counted = targets != ignore_index
    index = targets.where(counted, 0).unsqueeze(1)
    softmax.scatter_add_(1, index, softmax.new_full(index.shape, -1))
    return softmax.masked_fill_(~counted.unsqueeze(1), 0)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return the product, in the memory of x unless another backward pass may come."""
    # As large as the output layer: a copy would often be what decides the peak of a training step.
    kept = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
    return (x * factor).to(x.dtype) if kept else x.mul_(factor)
