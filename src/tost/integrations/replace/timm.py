"""Attention layers of timm's models: vision transformers, BEiT, Swin.

Shapes: x [B, N, C]; the windows of Swin are its batch, [W * B, N, C] for W windows per image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.integrations.replace.parts import TIMM, Attention, Parts, read_linear, split_fused
from tost.nn.masks import read_segments


class _Wrapper(nn.Module):
    """TSSA with the signature of another attention module.

    Args:
        attention: The TSSA layer.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention


class BiasedAttention(_Wrapper):
    """TSSA called as BEiT calls its attention."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Mix the tokens x [B, N, C]; a bias on scores between pairs of them is ignored."""
        return self.attention(x)


class WindowAttention(_Wrapper):
    """TSSA within windows, called as Swin calls its attention."""

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Do nothing: no parameter depends on the size of a window."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the tokens of each window, x [B * W, N, C].

        Args:
            x: Tokens; the windows of an image are next to each other.
            mask: For each of the W windows of an image which pairs of tokens meet, ``[W, N, N]``, 0 or -100: those
                that were neighbours before the image was shifted.

        Raises:
            ValueError: The mask does not divide the tokens of a window into regions.
        """
        if mask is None:
            return self.attention(x)
        regions = read_segments(mask)
        if regions is None:
            raise ValueError(
                "the mask of a window does not divide it into regions, and TSSA cannot leave out single pairs."
            )
        # One row per window and region: the same tokens, of which those of other regions are padding.
        window, first = torch.nonzero(regions == torch.arange(regions.shape[1], device=x.device), as_tuple=True)
        inside = regions[window] == first.unsqueeze(-1)
        rows = x.reshape(-1, len(mask), *x.shape[1:])[:, window]
        real = inside.expand(len(rows), -1, -1).flatten(0, 1)
        mixed = self.attention(rows.flatten(0, 1), real).reshape(rows.shape)
        mixed = mixed.masked_fill(~inside.unsqueeze(-1), 0)
        whole = mixed.new_zeros(len(rows), len(mask), *mixed.shape[2:]).index_add(1, window, mixed)
        return whole.flatten(0, 1)


def read(module: nn.Module) -> Parts | None:
    """Return the parts of an attention layer; None if it is none that can be replaced."""
    if _key(module) not in TIMM:
        return None
    found: Any = module
    for name, option in (("gate", "gated"), ("norm", "scale_norm")):
        if not isinstance(getattr(found, name, None), nn.Identity | None):
            raise ConfigError(
                f"this {type(module).__name__} was made with {option}=True, which a TSSA layer has no place for. Leave "
                "the layer as it is (layers=)."
            )
    biases = None
    if getattr(found, "q_bias", None) is not None:
        biases = (found.q_bias, found.k_bias, found.v_bias)
    query, key, value = split_fused(read_linear(found.qkv, "qkv", of=module), biases)
    dropped = []
    if getattr(found, "relative_position_bias_table", None) is not None:
        dropped.append("relative position biases")
    if not isinstance(getattr(found, "q_norm", None), nn.Identity | None):
        dropped.append("norms of queries and keys")
    out_drop = float(found.proj_drop.p)
    return Parts(query, key, value, found.proj, found.num_heads, out_drop=out_drop, dropped=tuple(dropped))


def wrap(attention: Attention, module: nn.Module) -> nn.Module:
    """Return the TSSA layer in the form in which `module` is called."""
    family = TIMM[_key(module)]
    if family == "BEiT":
        return BiasedAttention(attention)
    return WindowAttention(attention) if family == "Swin" else attention


def _key(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__
