"""The registered language models. Loads no torch."""

from __future__ import annotations

from typing import Any

from tost.models.language.options import LanguageOptions
from tost.models.spec import ModelSpec

# What each kind of language model changes. The last two have extensions to the paper, for quality at the same linear
# cost, and no learned positions, so that they run without end. What a name means stays: what wins later gets a number.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tost_lm_{}": ("causal language model", {}),
    "gpt2_{}": ("GPT-2: softmax attention in the same blocks", {"mixer": "softmax", "layer_scale": None}),
    "tost_lm_{}_plus": (
        "tost_lm with extensions: convolution, gate, forgetting",
        {
            **{"conv_width": 4, "gate": True, "count_scaled": True, "forget": True},
            **{"layer_scale": None, "position": "none"},
        },
    ),
    "tost_lm_{}_plus2": (
        "tost_lm with statistics about a gated mean and convolutions",
        {
            **{"mixer": "gated_tssa", "conv_width": 4, "conv_at": "both", "conv_start": "previous"},
            **{"layer_scale": None, "position": "none"},
        },
    ),
}


def _specs(size: str, embed_dim: int, depth: int, num_heads: int, *parameters: str) -> list[ModelSpec]:
    """Describe the language models of one size; `parameters` are their counts, in the order of the kinds."""
    sizes = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
    return [
        ModelSpec(
            name=name.format(size),
            build="tost.models.language.model:LanguageToST",
            options=LanguageOptions,
            tasks=("language_modeling",),
            defaults=sizes | more,
            description=f"{what}, {count} parameters",
        )
        for (name, (what, more)), count in zip(_KINDS.items(), parameters, strict=True)
    ]


LANGUAGE_MODELS = (
    *_specs("base", 768, 12, 12, "110M", "124M", "117M", "124M"),
    *_specs("medium", 1024, 24, 16, "304M", "354M", "328M", "354M"),
    *_specs("large", 1280, 36, 20, "655M", "772M", "713M", "773M"),
)
