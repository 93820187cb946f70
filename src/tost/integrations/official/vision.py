"""The authors' vision models (a fork of XCiT) and `VisionToST`."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor

from tost.errors import CheckpointError
from tost.integrations.official._table import Layout, Pair, State, affine, changed_options, count_blocks, first, rows
from tost.models import VisionOptions

STEM = "patch_embed.proj."
POSITIONS = "pos_embeder.token_projection"
HEADS = 8
"""Number of heads of every softmax model of the authors, which no tensor shows."""
DEEP = 12
"""Number of blocks above which the authors' layer scales start small."""

# What the tensors' names and shapes carry, and what does not matter to a trained model.
FREE = (
    *("embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size", "in_chans", "num_classes"),
    *("mixer", "layer_scale", "class_depth", "tokens_norm"),
)
HARMLESS = ("dropout", "head_dropout", "drop_path", "drop_path_rule", "gradient_checkpointing", "backend")
# Their names of the projection back and of the temperature, and the axes of length 1 after the latter.
MIXERS = {"tssa": ("to_out.0", "temp", 1), "xca": ("proj", "temperature", 2), "softmax": ("proj", None, 0)}


class VisionLayout(Layout):
    """Names and shapes of ``tost.py``: the models ``tost_cab_*``, ``xcit_cab_*`` and ``vit_cab_*``."""

    kind = "vision"
    options = VisionOptions

    def likeness(self, state: State) -> int:
        """Count the names of XCiT's layout."""
        return sum(name.startswith(("patch_embed.", "blocks.", "cls_attn_blocks.")) for name in state)

    def canonical(self, state: State) -> dict[str, Tensor]:
        """Resolve timm's name of the positions; write biases that a model was built without as zeros."""
        result = {re.sub(r"^pos_embed\.", "pos_embeder.", name): tensor for name, tensor in state.items()}
        if first(result, "", ".attn.qkv.bias") is None:
            weights = {name: tensor for name, tensor in result.items() if name.endswith(".attn.qkv.weight")}
            result |= {n.removesuffix("weight") + "bias": t.new_zeros(rows(t)) for n, t in weights.items()}
        return result

    def told(self, state: State) -> dict[str, Any]:
        """Return the sizes and the mixer.

        Raises:
            CheckpointError: They cannot be found, or this is another kind of model.
        """
        norm, qkv = first(state, "blocks.", ".norm1.weight"), first(state, "blocks.", ".attn.qkv.weight")
        width = rows(norm)
        _refuse_relatives(state)
        convolutions, entry = count_blocks(state, STEM), state.get(f"{STEM}0.0.weight")
        missing = [] if convolutions else [f"{STEM}0.0.weight"]
        missing += [] if width else ["blocks.0.norm1.weight"]
        missing += [] if rows(qkv) else ["blocks.0.attn.qkv.weight"]
        if missing or qkv is None:
            raise CheckpointError(f"this is no vision model of the authors; missing: {', '.join(missing)}")
        hidden, head = first(state, "blocks.", ".mlp.fc1.weight"), first(state, "head.", "")
        return {
            "embed_dim": width,
            "depth": count_blocks(state, "blocks."),
            "mlp_ratio": 4.0 if hidden is None else _ratio(rows(hidden), width),
            "patch_size": 2**convolutions,
            "in_chans": entry.shape[1] if entry is not None and entry.dim() == 4 else 3,
            "num_classes": rows(head),
            "class_depth": count_blocks(state, "cls_attn_blocks."),
            "feed_forward": "mlp",
            **_mixer(state, rows(qkv), width),
        }

    def assumed(self, state: State) -> dict[str, Any]:
        """Return the initial layer scale, the heads of softmax attention, and the norm inside class attention."""
        gammas = any(name.endswith((".gamma1", ".gamma2")) for name in state)
        start = 1.0 if count_blocks(state, "blocks.") <= DEEP else 1e-5
        return {"layer_scale": start if gammas else None, "num_heads": HEADS, "tokens_norm": True}

    def pairs(self, options: VisionOptions) -> list[Pair]:
        """Return the table for a model with these options."""
        table = [Pair("cls_token", ("cls_token",))]
        for i in range(0, 2 * options.patch_size.bit_length() - 3, 2):
            conv, norm = f"{STEM}{i}.0", f"{STEM}{i}.1"
            statistics = ("running_mean", "running_var", "num_batches_tracked")
            table += affine(conv, conv, bias=False) + affine(norm, norm)
            table += [Pair(f"{norm}.{name}", (f"{norm}.{name}",)) for name in statistics]
        table += affine(POSITIONS, "pos_embed.token_projection")
        gammas = () if options.layer_scale is None else ("gamma1", "gamma2")
        back, temperature, ones = MIXERS[options.mixer]
        for i in range(options.depth):
            block, attention = f"blocks.{i}", f"blocks.{i}.attention"
            table += affine(f"{block}.norm1", f"{block}.norm1")
            table += affine(f"{block}.attn.qkv", f"{attention}.proj_in")
            if temperature is not None:
                table += [Pair(f"{block}.attn.{temperature}", (f"{attention}.temperature",), ones)]
            table += affine(f"{block}.attn.{back}", f"{attention}.proj_out")
            table += affine(f"{block}.norm2", f"{block}.norm2")
            table += affine(f"{block}.mlp.fc1", f"{block}.mlp.proj_in")
            table += affine(f"{block}.mlp.fc2", f"{block}.mlp.proj_out")
            table += [Pair(f"{block}.{gamma}", (f"{block}.{gamma}",)) for gamma in gammas]
        for i in range(options.class_depth):
            block = f"cls_attn_blocks.{i}"
            for name in ("norm1", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
                table += affine(f"{block}.{name}", f"{block}.{name}")
            table += affine(f"{block}.attn.qkv", *(f"{block}.attn.{part}" for part in "qkv"))
            table += [Pair(f"{block}.{gamma}", (f"{block}.{gamma}",)) for gamma in gammas]
        return table + affine("norm", "norm") + (affine("head", "head") if options.num_classes else [])

    def lacks(self, options: VisionOptions) -> list[str]:
        """Return the options that the authors' code lacks."""
        found = changed_options(options, (*FREE, *HARMLESS))
        found += [] if options.patch_size in (8, 16) else [f"patch_size={options.patch_size}"]
        return found + ([] if options.mixer in MIXERS else [f"mixer={options.mixer}"])


def _mixer(state: State, projected: int, width: int) -> dict[str, Any]:
    """Return the mixer that projects `width` numbers to `projected` ones, and its heads if they are known."""
    temperature = first(state, "blocks.", ".attn.temp")
    if temperature is None:
        temperature = first(state, "blocks.", ".attn.temperature")
    heads = {} if temperature is None else {"num_heads": temperature.numel()}
    if projected == width:
        return {"mixer": "tssa", **(heads or {"num_heads": 1})}
    if projected == 3 * width:
        return {"mixer": "xca" if heads else "softmax", **heads}
    raise CheckpointError(
        f"blocks.0.attn.qkv.weight has {projected} rows for tokens of width {width}; {width} (TSSA) or {3 * width} "
        "(XCiT, softmax attention) are needed"
    )


def _refuse_relatives(state: State) -> None:
    """Refuse models that share many names with these, in words that help."""
    if first(state, "blocks.", ".local_mp.conv1.weight") is not None:
        raise CheckpointError(
            "this is an XCiT with local patch interaction (blocks.0.local_mp), which the ToST paper's models do "
            "without; timm has it: timm.create_model('xcit_small_12_p16_224')"
        )
    if "patch_embed.proj.weight" in state:
        raise CheckpointError(
            "this is a vision transformer with a single patch convolution (patch_embed.proj.weight), such as ViT or "
            "DeiT; timm has it: timm.create_model('vit_small_patch16_224'). The authors' models have XCiT's stem."
        )


def _ratio(hidden: int, width: int) -> float:
    """Return a ratio that gives `hidden` also when a product with it is rounded down."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
