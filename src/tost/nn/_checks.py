"""Checks, types and helpers that the modules share."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tost import parallel
from tost.errors import BackendError


class Factory(TypedDict, total=False):
    """Device and dtype of the parameters, as torch's own modules take them."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raise for a width that cannot be split into that many heads."""
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            f"embed_dim ({embed_dim}) must be divisible by num_heads ({num_heads}): "
            "every head takes an equal share of the width. Change one of the two."
        )


def check_blocks(head_dim: int, block_size: int) -> None:
    """Raise for blocks of features that do not divide a head."""
    if block_size < 1 or head_dim % block_size:
        raise ValueError(
            f"block_size ({block_size}) must divide the width of a head ({head_dim}): blocks take whole features of "
            "one head. Change block_size or num_heads."
        )


def check_width(x: Tensor, embed_dim: int) -> None:
    """Raise for anything but tokens of the width that a module was made for."""
    if x.dim() != 3 or x.shape[-1] != embed_dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; this module needs [B, N, {embed_dim}].")


def check_memory(memory: Tensor, batch: int, shape: tuple[int, ...]) -> None:
    """Raise for the memory of a `RecurrentState` that is not of this batch or mixer."""
    if memory.shape != (batch, *shape):
        raise ValueError(
            f"the state has a memory of shape {tuple(memory.shape)}, but {batch} sequences and this mixer need "
            f"{(batch, *shape)}. Pass the state that came from the same batch and model, or None at the start."
        )


def refuse_context(what: str) -> None:
    """Raise where each rank holds a piece of the sequence: the result would be wrong."""
    if parallel.active() is not None:
        raise BackendError(
            f"{what} needs whole sequences, but a ContextParallel context is active and each rank holds only a piece. "
            "Use TSSA without it, or run this model without context parallelism."
        )


def is_plain(module: nn.Module) -> bool:
    """Return whether calling a module runs only the forward of its class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def is_plain_linear(layer: nn.Module) -> bool:
    """Return whether a layer is no more than its weight and bias, so that they may be used without calling it."""
    return type(layer) is nn.Linear and is_plain(layer) and not is_traceable_wrapper_subclass(layer.weight)


def has_global_hooks() -> bool:
    """Return whether torch calls hooks around the forward of every module."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
