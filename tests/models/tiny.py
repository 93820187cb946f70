"""Small models of every family, with weights that leave nothing out."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tost
from tost.models import (
    CrateOptions,
    LanguageOptions,
    SequenceClassifierOptions,
    VisionOptions,
    VitOptions,
    model_options,
    model_spec,
)

TINY = {
    LanguageOptions: {
        **{"embed_dim": 16, "depth": 2, "num_heads": 4, "vocab_size": 11},
        **{"position": "learned", "max_length": 24},  # the form of the paper, which has the most parts
    },
    SequenceClassifierOptions: {"embed_dim": 16, "depth": 2, "num_heads": 4, "max_length": 24, "num_classes": 3},
    VisionOptions: {"embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3},
    CrateOptions: {"embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3, "image_size": 32},
    VitOptions: {"embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3, "image_size": 32},
}

# Options of the models that take a path of their own, by name.
PLUS = {"mixer": "tssa_plus", "mixer_options": {"block_size": 2}}
LANGUAGE_VARIANTS = {
    "plain": {},
    "gated": {**PLUS, "position": "none"},
    "gated features": {"mixer": "tssa_plus", "mixer_options": {"block_size": 1}},
    "convolutions": {"conv_width": 4, "conv_at": "both", "position": "sinusoidal"},
    "checkpointing": {"gradient_checkpointing": True, "dropout": 0.1},
    "own head": {"tie_head": False, "bias": True, "layer_scale": None},
}
VISION_VARIANTS = {
    "blocks": PLUS,
    "convolutions": {"conv_width": 3, "normalize": False},
    "ista": {"feed_forward": "ista", "drop_path": 0.1, "drop_path_rule": "linear", "global_pool": "avg"},
}


def tiny_options(name):
    """Options that make a registered model small, with as many features in a block as fit into its heads."""
    spec = model_spec(name)
    blocks = {"mixer_options": PLUS["mixer_options"]} if spec.defaults.get("mixer") == "tssa_plus" else {}
    return {**TINY[spec.options], **blocks}


def make_tiny(name, **overrides):
    return tost.create_model(name, **{**tiny_options(name), **overrides})


def distinct():
    """Names of models that are not the same once they are small."""
    found = {}
    for name in tost.list_models():
        found.setdefault(model_options(name, tiny_options(name)), name)
    return sorted(found.values())


def perturb(model, by=0.3):
    """Move every parameter off its initial value: fresh layer scales would hide the branches of every block."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return model


def example(model, batch=2, length=9, dtype=torch.float32):
    """An input of the kind that a model takes."""
    options = model.options
    if hasattr(options, "in_chans"):
        return torch.randn(batch, options.in_chans, 32, 32, dtype=dtype)
    shape = (batch, 2, length) if getattr(options, "towers", 1) == 2 else (batch, length)
    if getattr(options, "input", "tokens") == "values":
        return torch.randn(*shape, options.in_features, dtype=dtype)
    return torch.randint(options.vocab_size, shape)


def count_products(run, *inputs):
    """The operations of a call's matrix products, as torch counts them; those of the TSSA kernels are left out."""
    # The fused attention of a CPU is not counted; its steps are.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        run(*inputs)
    return sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "tost" not in str(op))


def padded(x, before, after):
    """Rows of x with junk on both sides, and the mask that tells it apart."""
    batch, length = x.shape[:2]
    mask = torch.zeros(batch, before + length + after, dtype=torch.bool)
    mask[:, before : before + length] = True
    junk = torch.full((batch, mask.shape[1], *x.shape[2:]), -100 if not x.is_floating_point() else float("nan"))
    junk = junk.to(x.dtype)
    junk[mask] = x.flatten(0, 1)
    return junk, mask


class Running(nn.Module):
    """Causal, without a state."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()

    def forward(self, x, mask=None):
        return x.cumsum(dim=1)
