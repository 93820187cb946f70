"""The white box while it learns: the compression term of the coding rate, layer by layer.

For a layer with projected tokens w and memberships pi, with ``n_k`` the mass of group k and ``s_k`` its second moment,

    R_c_var = 1/2 sum_k n_k/n sum_d log(1 + s_k[d])

is the objective that the layer's attention takes a gradient step on. In a trained model it should mostly fall with
depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tost.nn import CausalTSSAttention, TSSAttention
from tost.ops import causal_membership, membership

__all__ = ["compression_by_layer", "compression_of_tokens"]


def compression_of_tokens(w: Tensor, pi: Tensor) -> Tensor:
    """Return R_c_var of every sequence.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        pi: Memberships, ``[B, N, H]``; 0 for padding.

    Returns:
        ``[B]``, in the dtype of `pi`.
    """
    mass = pi.sum(dim=1)
    moment = torch.einsum("bnh,bnhd->bhd", pi, w.to(pi.dtype).square()) / mass.clamp_min(1e-8).unsqueeze(-1)
    tokens = mass.sum(dim=-1, keepdim=True).clamp_min(1)
    return 0.5 * (mass / tokens * moment.log1p().sum(dim=-1)).sum(dim=-1)


@torch.no_grad()
def compression_by_layer(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """Measure R_c_var in every attention layer while `run` runs the model once.

    Args:
        model: Holds attention modules of ours.
        run: Runs the model on a batch, in evaluation mode.

    Returns:
        ``compression/layer_00`` and so on, in the order in which the layers run: the mean over the batch.
    """
    found: list[Tensor] = []
    with _watching(model, found):
        run()
    return {f"compression/layer_{index:02d}": value.item() for index, value in enumerate(found)}


@contextmanager
def _watching(model: nn.Module, found: list[Tensor]) -> Iterator[None]:
    """Collect the measure of every attention module; leaves no hook behind."""
    handles = []
    for module in model.modules():
        if isinstance(module, TSSAttention | CausalTSSAttention):
            masks: dict[str, Tensor | None] = {}
            handles.append(module.register_forward_pre_hook(_note_mask(masks), with_kwargs=True))
            handles.append(module.proj_in.register_forward_hook(_measure(module, masks, found)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_mask(masks: dict[str, Tensor | None]) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        masks["mask"] = named.get("mask", arguments[1] if len(arguments) > 1 else None)

    return hook


def _measure(
    attention: TSSAttention | CausalTSSAttention, masks: dict[str, Tensor | None], found: list[Tensor]
) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        w = output.reshape(*output.shape[:-1], attention.num_heads, attention.head_dim)
        mask = masks.get("mask")
        temperature = attention.temperature.expand(attention.num_heads)
        options = attention.operator_options()
        if isinstance(attention, CausalTSSAttention):
            pi = causal_membership(w, temperature, attention.bias_of(w, mask=mask), mask=mask, **options)
        else:
            pi = membership(w, temperature, mask=mask, **options)
        found.append(compression_of_tokens(w, pi).mean())

    return hook
