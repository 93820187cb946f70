"""The layers that are measured side by side, and the check that they compute what their names promise.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from tost.bench.attention.cases import Figure, Point
from tost.bench.harness.gate import BOUNDS, Check
from tost.nn import (
    Carry,
    CausalSoftmaxAttention,
    CausalTSSAttention,
    CrossCovarianceAttention,
    SoftmaxAttention,
    SubspaceAttention,
    TSSAttention,
)
from tost.testing import relative_rms


def _attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v with all scores in memory; everything is [B, N, H, D]."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
    if causal:
        N = scores.shape[-1]
        hidden = torch.ones(N, N, dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(hidden, -math.inf)
    weights = scores.softmax(dim=-1)
    del scores  # they would stay in memory next to the weights
    return (weights @ value).transpose(1, 2)


class TextbookAttention(SoftmaxAttention):
    """Softmax attention as a textbook writes it: the scores of all pairs of tokens exist at once.

    The same arguments, parameters and results as `tost.nn.SoftmaxAttention`; masks and dropout are left out.
    """

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            raise ValueError("the textbook's attention is here to be measured and takes no mask; leave it out.")
        return _attend(query, key, value, causal=False)


class TextbookCausalAttention(CausalSoftmaxAttention):
    """Causal softmax attention as a textbook writes it; the same as `tost.nn.CausalSoftmaxAttention` without state."""

    def forward(  # type: ignore[override]  # a causal mixer takes a state and no grid
        self, x: Tensor, mask: Tensor | None = None, *, carry: Carry | None = None
    ) -> Tensor:
        """Mix the tokens x [B, N, C], each with those before it.

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Must be None.
            carry: Must be None.

        Returns:
            ``[B, N, C]``.

        Raises:
            ValueError: A mask or a state was given.
        """
        if mask is not None:
            raise ValueError("the textbook's attention is here to be measured and takes no mask; leave it out.")
        if carry is not None:
            raise ValueError("the textbook's attention keeps no state; use tost.nn.CausalSoftmaxAttention.")
        parts = self.proj_in(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim)
        return self.proj_out(_attend(*parts.unbind(2), causal=True).flatten(2))


def build_layer(point: Point) -> nn.Module:
    """Return one attention layer, ``[B, N, C]`` to ``[B, N, C]``.

    All have a bias at their output, ToST's causal form too, though the language models have none: without residual
    sums between the layers the tokens would otherwise shrink to numbers that processors are slow with.
    """
    C, H = point.width, point.heads
    if point.contender == "tost":
        return CausalTSSAttention(C, H, point.tokens, out_bias=True) if point.causal else TSSAttention(C, H)
    kinds: dict[str, Any] = {
        "vit-sdpa": SoftmaxAttention,
        "vit-textbook": TextbookAttention,
        "crate": SubspaceAttention,
        "xcit": CrossCovarianceAttention,
        "gpt2-sdpa": CausalSoftmaxAttention,
        "gpt2-textbook": TextbookCausalAttention,
    }
    return cast(nn.Module, kinds[point.contender](C, H))


def build_layers(point: Point) -> nn.Module:
    """Return what a point measures: layers one after the other, or a whole language model."""
    if point.whole:
        return _LastLogits(point)
    return nn.Sequential(*(build_layer(point) for _ in range(point.depth)))


class _LastLogits(nn.Module):
    """A language model that reads ids [B, N] and gives the logits of the next token, [B, V]."""

    def __init__(self, point: Point) -> None:
        super().__init__()
        from tost.models import create_model

        name = "tost_lm_base" if point.contender == "tost" else "gpt2_base"
        sizes = {"embed_dim": point.width, "num_heads": point.heads, "depth": point.depth}
        sizes |= {"max_length": point.tokens, "vocab_size": point.vocab_size}
        model: Any = create_model(name, **sizes).eval()
        if point.contender == "gpt2-textbook":
            for block in model.blocks:
                block.attention = _as_textbook(block.attention)
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Read a text. No state is kept: what later tokens would need is no part of this comparison."""
        model: Any = self.model
        return model.logits(model._features(ids, None, None)[:, -1])


def _as_textbook(layer: CausalSoftmaxAttention) -> TextbookCausalAttention:
    bias = layer.proj_in.bias is not None
    other = TextbookCausalAttention(layer.embed_dim, layer.num_heads, in_bias=bias, out_bias=bias)
    other.load_state_dict(layer.state_dict())
    return other


@torch.no_grad()
def check_layers() -> list[Check]:
    """Compare every baseline with its definition in float64, on the same weights and tokens."""
    checks = []
    for name in ("vit-sdpa", "vit-textbook", "crate", "xcit", "gpt2-sdpa", "gpt2-textbook"):
        figure = Figure.CAUSAL if name.startswith("gpt2") else Figure.TOKENS
        torch.manual_seed(0)
        layer = build_layer(Point(figure=figure, contender=name, tokens=37, width=24, heads=3, depth=1)).eval()
        x = torch.randn(2, 37, 24)
        y = layer(x)
        expected = _definition(name, layer.double(), x.double())
        checks.append(Check(name=f"layer {name}", error=relative_rms(y, expected), bound=BOUNDS[torch.float32]))
    return checks


def _definition(name: str, layer: Any, x: Tensor) -> Tensor:
    """Return what a layer has to compute, one head after the other."""
    projected = layer.proj_in(x).unflatten(-1, (-1, layer.num_heads, layer.head_dim))
    query, key, value = (projected[:, :, min(part, projected.shape[2] - 1)] for part in range(3))
    heads = []
    for h in range(layer.num_heads):
        q, k, v = query[:, :, h], key[:, :, h], value[:, :, h]
        if name == "xcit":
            q, k = q / q.norm(dim=1, keepdim=True), k / k.norm(dim=1, keepdim=True)
            weights = (layer.temperature[h] * q.transpose(1, 2) @ k).softmax(dim=-1)
            heads.append(v @ weights.transpose(1, 2))
            continue
        scores = q @ k.transpose(1, 2) / math.sqrt(layer.head_dim)
        if name.startswith("gpt2"):
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        heads.append(scores.softmax(dim=-1) @ v)
    return layer.proj_out(torch.cat(heads, dim=-1))
