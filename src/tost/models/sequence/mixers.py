"""From the options of a long-range model to the token mixer of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tost.models.options import SequenceClassifierOptions
from tost.nn import (
    S4,
    BigBird,
    Extensions,
    LinearAttention,
    Linformer,
    NystromAttention,
    Performer,
    Reformer,
    SoftmaxAttention,
    TSSAttention,
)

__all__ = ["build_mixer"]

# What each class is given besides its own options: its dropouts, biases and limits.
_ATTENTION: dict[str, Callable[..., nn.Module]] = {
    "softmax": SoftmaxAttention,
    "bigbird": BigBird,
    "nystrom": NystromAttention,
    "linformer": Linformer,
}
_FEATURES: dict[str, Callable[..., nn.Module]] = {"linear": LinearAttention, "performer": Performer}


def build_mixer(options: SequenceClassifierOptions) -> nn.Module:
    """Return the mixer that the options of a model name.

    Args:
        options: Options of a `SequenceClassifier`.

    Returns:
        A module that is called as ``mixer(x, mask)``.
    """
    o = options
    own: dict[str, Any] = dict(options.all_mixer_options())
    sizes = (o.embed_dim, o.num_heads)
    biases: dict[str, Any] = {"in_bias": o.mixer_bias, "out_bias": o.mixer_bias}
    weight_drop = o.dropout if o.attention_dropout is None else o.attention_dropout
    # A class token is one more than the sequence has.
    length = o.max_length + (o.pooling == "cls")
    if o.mixer == "tssa":
        own["extensions"] = Extensions(gate=own.pop("gate"), count_scaled=own.pop("count_scaled"))
        own |= {"gain_drop": weight_drop, "out_drop": o.dropout, "backend": o.backend}
        return TSSAttention(o.embed_dim, o.num_heads, **biases, **own)
    if o.mixer in _FEATURES:
        return _FEATURES[o.mixer](*sizes, **biases, **own, out_drop=o.dropout)
    if o.mixer in _ATTENTION:
        limit = {"max_length": length} if o.mixer == "linformer" else {}
        return _ATTENTION[o.mixer](*sizes, **biases, **own, **limit, attn_drop=weight_drop, out_drop=o.dropout)
    if o.mixer == "reformer":
        return Reformer(*sizes, **own, attn_drop=weight_drop, out_drop=o.dropout)
    step, init = (own.pop("step_min"), own.pop("step_max")), own.pop("init", None)
    kernel = "s4" if init is None else f"s4d-{init}"
    return S4(*sizes, **own, kernel=kernel, max_length=length, step=step, drop=o.dropout)  # type: ignore[arg-type]
