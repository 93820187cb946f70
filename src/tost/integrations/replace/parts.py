"""The attention classes of other libraries that can be replaced, their parts, and the TSSA layer in their place.

Shapes: weights [H * D, C] for H heads of width D and tokens of width C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.nn import BlockTSSAttention, CausalTSSAttention, GatedTSSAttention, TSSAttention

Source = Literal["value", "query", "key"]
Attention = TSSAttention | CausalTSSAttention | GatedTSSAttention

TIMM = {
    ("timm.layers.attention", "Attention"): "ViT",
    ("timm.models.beit", "Attention"): "BEiT",
    ("timm.models.swin_transformer", "WindowAttention"): "Swin",
}
"""By module and name: the models that they are from."""

BERT = ("query", "key", "value", None)
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj")
TRANSFORMERS: dict[str, tuple[str | None, ...]] = {
    "BertSelfAttention": BERT,
    "RobertaSelfAttention": BERT,
    "XLMRobertaSelfAttention": BERT,
    "CamembertSelfAttention": BERT,
    "ElectraSelfAttention": BERT,
    "DistilBertSelfAttention": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "ViTAttention": LLAMA,
    "GPT2Attention": ("c_attn", "c_proj"),
    "LlamaAttention": LLAMA,
    "MistralAttention": LLAMA,
    "Qwen2Attention": LLAMA,
    "Qwen3Attention": LLAMA,
}
"""By name: the projections to queries, keys and values, or one for all three; the output projection, if it has one."""


class Projection(NamedTuple):
    """One linear map of an attention layer: weight ``[H * D, C]``, or fewer heads where several share one, and bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Parts:
    """An attention layer of another library.

    Attributes:
        query: The projection to queries.
        key: The projection to keys.
        value: The projection to values.
        out: The output projection, kept as it is; the identity if it is in another module.
        num_heads: Number of heads of the queries.
        causal: Each token attends only to those before it.
        max_length: Longest sequence that the model is made for.
        out_drop: Dropout after the output projection.
        dropped: What of the layer acts on scores between pairs of tokens, and goes with them.
    """

    query: Projection
    key: Projection
    value: Projection
    out: nn.Module
    num_heads: int
    causal: bool = False
    max_length: int = 1024
    out_drop: float = 0.0
    dropped: tuple[str, ...] = ()


def read_linear(module: nn.Module, name: str, *, of: nn.Module) -> Projection:
    """Return the weight of a linear layer, ``[out, in]``."""
    if type(module) is nn.Linear:
        return Projection(module.weight, module.bias)
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        conv: Any = module  # a linear layer whose weight is [in, out]
        return Projection(conv.weight.t(), conv.bias)
    raise ConfigError(
        f"the projection {name} of {type(of).__name__} is a {type(module).__name__}, no plain linear layer, so no TSSA "
        "layer can start from its weights. Replace attention before adapters are added (or merge them) and before "
        "quantizing."
    )


def split_fused(fused: Projection, biases: tuple[Tensor | None, ...] | None = None) -> tuple[Projection, ...]:
    """Return query, key and value of one projection to all three; `biases` are theirs if it has none."""
    weights = fused.weight.chunk(3)
    if biases is None:
        biases = (None, None, None) if fused.bias is None else tuple(fused.bias.chunk(3))
    return tuple(Projection(weight, bias) for weight, bias in zip(weights, biases, strict=True))


def build_attention(
    parts: Parts,
    *,
    causal: bool,
    num_heads: int,
    source: Source,
    block_size: int | None,
    backend: str,
) -> Attention:
    """Return a TSSA layer that starts from the weights of another attention layer; see `replace_attention`."""
    inner, width = parts.query.weight.shape
    if inner % num_heads:
        raise ConfigError(f"num_heads={num_heads} does not divide the {inner} features of all heads; choose a divisor.")
    old: Projection = getattr(parts, source)
    options: dict[str, Any] = {
        "in_bias": old.bias is not None,
        "out_bias": False,
        "out_drop": parts.out_drop,
        "backend": backend,
        "device": old.weight.device,
        "dtype": old.weight.dtype,
    }
    if block_size is None:
        options["head_dim"] = inner // num_heads
    elif inner != width or block_size < 1 or inner // num_heads % block_size:
        raise ConfigError(
            "plus=True needs heads that together are as wide as the tokens, and a block_size that divides a head; "
            f"tokens have {width} features, each of {num_heads} heads {inner // num_heads}, block_size={block_size}. "
            "Choose another block_size or num_heads, or the paper's form (plus=False)."
        )
    else:
        options["block_size"] = block_size
    made: Attention
    if causal and block_size is None:
        made = CausalTSSAttention(width, num_heads, parts.max_length, position_bias=None, **options)
    elif causal:
        made = GatedTSSAttention(width, num_heads, parts.max_length, **options)
    else:
        made = (TSSAttention if block_size is None else BlockTSSAttention)(width, num_heads, **options)
    made.proj_out = cast(nn.Linear, parts.out)
    with torch.no_grad():
        # The operators turn the sign: from -V comes a share of each value.
        made.proj_in.weight.copy_(-_for_all_heads(old.weight, inner, parts.num_heads))
        if old.bias is not None and made.proj_in.bias is not None:  # gated statistics do not depend on it
            made.proj_in.bias.copy_(-_for_all_heads(old.bias, inner, parts.num_heads))
    made.proj_in.requires_grad_(old.weight.requires_grad)
    return made


def _for_all_heads(x: Tensor, inner: int, num_heads: int) -> Tensor:
    """Repeat what several heads share, [heads * D, ...] -> [H * D, ...]."""
    if len(x) == inner:
        return x
    heads = x.reshape(-1, inner // num_heads, *x.shape[1:])
    return heads.repeat_interleave(num_heads // len(heads), dim=0).flatten(0, 1)
