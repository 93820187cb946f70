"""Compression term of the coding rate by layer, measured during training.

For a layer with projected tokens w and memberships pi, with ``n_k`` the mass of group k and ``s_k`` its second moment,

    R_c_var = 1/2 sum_k n_k/n sum_d log(1 + s_k[d])

is the objective that the layer's attention takes a gradient step on. With statistics in blocks of features s_k is a
matrix for each block, and the sum is one of log det(I + s_k). In a trained model it should mostly fall with
depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tost.analysis.records import LayerRecord, attention_layers, capture
from tost.objective import spectral_sum
from tost.ops._blocks import in_blocks


def compression_of_tokens(w: Tensor, pi: Tensor, block_size: int = 1) -> Tensor:
    """Return R_c_var of every sequence.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        pi: Memberships, ``[B, N, H]``; 0 for padding.
        block_size: Features in a block of the statistics.

    Returns:
        ``[B]``, in the dtype of `pi`.
    """
    mass = pi.sum(dim=1)
    tokens = mass.sum(dim=-1, keepdim=True).clamp_min(1)
    if block_size > 1:
        blocks = in_blocks(w.to(pi.dtype), block_size)
        moments = (
            torch.einsum("bnh,bnhki,bnhkj->bhkij", pi, blocks, blocks) / mass.clamp_min(1e-8)[..., None, None, None]
        )
        return 0.5 * (mass / tokens * spectral_sum(moments).sum(dim=-1)).sum(dim=-1)
    moment = torch.einsum("bnh,bnhd->bhd", pi, w.to(pi.dtype).square()) / mass.clamp_min(1e-8).unsqueeze(-1)
    return 0.5 * (mass / tokens * moment.log1p().sum(dim=-1)).sum(dim=-1)


@torch.no_grad()
def compression_by_layer(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """Measure R_c_var in every TSSA layer while `run` runs the model once.

    Args:
        model: The model.
        run: Runs the model on a batch, in evaluation mode.

    Returns:
        ``compression/layer_00`` and so on, in the order in which the layers run: the mean over the batch. Empty for a
        model without TSSA layers.
    """
    if not attention_layers(model):
        return {}
    found: list[Tensor] = []

    def measure(record: LayerRecord) -> None:
        block_size = record.layer.attention.extensions.block_size
        found.append(compression_of_tokens(record.stream("tokens"), record.membership(), block_size).mean())

    with capture(model, visit=measure):
        run()
    return {f"compression/layer_{index:02d}": value.item() for index, value in enumerate(found)}
