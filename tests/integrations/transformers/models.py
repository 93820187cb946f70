"""Tiny models for the tests of the transformers integration: one of each kind, with weights that matter."""

from __future__ import annotations

import torch

from tost.integrations.transformers import TostConfig, TostForCausalLM

# A layer scale of 1e-5 would hide every mistake in a block.
TINY = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 48,
    "layer_scale": 1.0,
    "pad_token_id": 0,
}
KINDS = {
    "authors": {},
    "plus": {
        **{"mixer": "tssa_plus", "mixer_options": {"block_size": 4}, "position": "none"},
        **{"conv_width": 4, "conv_at": "both", "conv_start": "previous"},
    },
    "both": {"conv_width": 3, "conv_at": "both", "position": "sinusoidal", "tie_head": False, "bias": True},
    "none": {"position": "none"},
    "gpt2": {"mixer": "softmax", "layer_scale": None, "bias": True, "activation": "gelu_tanh"},
}
LINEAR = [kind for kind in KINDS if kind != "gpt2"]


def make(kind: str = "authors", *, dtype: torch.dtype = torch.float32, **more) -> TostForCausalLM:
    """A model in evaluation mode; every parameter is random, those that start as constants too."""
    torch.manual_seed(0)
    model = TostForCausalLM(TostConfig(**{**TINY, **KINDS[kind], **more}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids; 0 is padding and is not among them."""
    return torch.randint(1, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[torch.Tensor], fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of rows of different length, and its mask."""
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat((torch.full((longest - len(row),), fill), row)) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return ids, mask
