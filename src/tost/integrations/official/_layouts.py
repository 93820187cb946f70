"""The authors' tensors and ours: one table per kind of model, read in both directions.

Vision models are a fork of XCiT (``tost_cab_*``, ``xcit_cab_*``, ``vit_cab_*``); language models have the layout of
nanoGPT, with TSSA (``model_TSSA.py``) or softmax attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tost.errors import CheckpointError
from tost.models import LanguageOptions, VisionOptions

State = Mapping[str, Tensor]
Known = Mapping[str, tuple[Any, ...]]
"""Values of options that the authors' code can compute with."""

MOST_NAMES = 40
"""Names in a message."""

BLOCKS, TOKENS, POSITIONS, HEAD = "transformer.h.", "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
STEM = "patch_embed.proj."

# Other names, inside a block, of the tensors that ToST added to nanoGPT.
ALIASES = {
    **{alias: f"gamma{i}" for i in (1, 2) for alias in (f"gamma_{i}", f"ls_{i}.gamma", f"ls{i}.gamma")},
    **{"attn.temperature": "attn.temp", "attn.bias": "attn.denom_bias"},
}
# The authors' names of the projection back and of the temperature, and the axes of length 1 after the latter.
MIXERS = {"tssa": ("to_out.0", "temp", 1), "xca": ("proj", "temperature", 2), "softmax": ("proj", None, 0)}


@dataclass(frozen=True)
class Pair:
    """One tensor of the authors and its place here.

    Attributes:
        theirs: Their name.
        ours: Our names. If there are several, their tensors are concatenated along the first axis of theirs.
        ones: Axes of length 1 that theirs has behind ours.
    """

    theirs: str
    ours: tuple[str, ...]
    ones: int = 0


class LanguageLayout:
    """Names and shapes of the authors' language models."""

    kind = "language"
    options = LanguageOptions
    unneeded = ("dropout", "gradient_checkpointing", "backend")
    in_tensors: tuple[str, ...] = ("mixer", "embed_dim", "depth", "num_heads", "mlp_ratio", "layer_scale", "bias")
    in_tensors += ("vocab_size", "max_length", "tie_head")
    known: ClassVar[Known] = {"tie_head": (True,), "mixer": ("tssa", "softmax")}

    def likeness(self, state: State) -> int:
        """Count the names of nanoGPT's layout."""
        return sum(name.startswith("transformer.") for name in state)

    def canonical(self, state: State) -> dict[str, Tensor]:
        """Resolve aliases, drop duplicates, and cut position biases to the positions."""
        result: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if name.startswith(BLOCKS) and name.endswith(".attn.bias") and tensor.dim() == 4:
                continue  # the causal mask of softmax attention, where torch has no fused one
            place = re.fullmatch(rf"({re.escape(BLOCKS)}\d+\.)(.+)", name)
            known = name if place is None else place[1] + ALIASES.get(place[2], place[2])
            if known in result:
                raise CheckpointError(f"the checkpoint holds {known} under two names, one of them {name}")
            result[known] = tensor
        # The head is the embedding; a file that stores shared tensors once may have kept either name.
        if HEAD in result and (TOKENS not in result or _equal(result[HEAD], result[TOKENS])):
            result[TOKENS] = result.pop(HEAD)
        if length := rows(result.get(POSITIONS)):  # the authors' crop_block_size cuts the positions only
            biases = {n: t[:, :length] for n, t in result.items() if n.endswith(".attn.denom_bias") and t.dim() > 1}
            result |= biases
        return result

    def read(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options that the tensors decide, and defaults of the authors' code for others."""
        tokens, projection = state.get(TOKENS), first(state, BLOCKS, ".attn.c_attn.weight")
        missing = [name for name in (TOKENS, POSITIONS) if not rows(state.get(name))]
        missing += [f"{BLOCKS}0.attn.c_attn.weight"] if projection is None else []
        if tokens is None or tokens.dim() != 2 or projection is None or missing:
            raise CheckpointError(f"this is no language model of the authors; missing: {', '.join(missing) or TOKENS}")
        width = tokens.shape[1]
        softmax = rows(projection) == 3 * width  # a query, a key and a value per token
        temperature, hidden = first(state, BLOCKS, ".attn.temp"), first(state, BLOCKS, ".mlp.c_fc.weight")
        heads = {} if softmax else {"num_heads": 1 if temperature is None else temperature.numel()}
        gammas = any(name.endswith((".gamma1", ".gamma2")) for name in state)
        decided = {
            "mixer": "softmax" if softmax else "tssa",
            "embed_dim": width,
            "depth": count_blocks(state, BLOCKS),
            **heads,
            "mlp_ratio": 4.0 if hidden is None else rows(hidden) / width,
            "vocab_size": tokens.shape[0],
            "max_length": rows(state[POSITIONS]),
            "bias": any(name.endswith(".bias") for name in state),
            "tie_head": HEAD not in state,
            "position": "learned",
        }
        # The heads of every GPT-2 are 64 wide, which the tensors of softmax attention do not contain.
        return decided, {"layer_scale": 1e-5 if gammas else None, "num_heads": max(1, width // 64)}

    def pairs(self, options: Any) -> list[Pair]:
        """Return the table for a model with these options."""
        table = [Pair(TOKENS, ("tokens.weight",)), Pair(POSITIONS, ("positions.weight",))]
        layers = {"ln_1": "norm1", "attn.c_attn": "attention.proj_in", "attn.c_proj": "attention.proj_out"}
        layers |= {"ln_2": "norm2", "mlp.c_fc": "mlp.proj_in", "mlp.c_proj": "mlp.proj_out"}
        for i in range(options.depth):
            theirs, ours = f"{BLOCKS}{i}", f"blocks.{i}"
            for their_name, our_name in layers.items():
                table += affine(f"{theirs}.{their_name}", f"{ours}.{our_name}", bias=options.bias)
            if options.mixer == "tssa":
                table += [Pair(f"{theirs}.attn.temp", (f"{ours}.attention.temperature",), ones=1)]
                table += [Pair(f"{theirs}.attn.denom_bias", (f"{ours}.attention.position_bias",), ones=1)]
            if options.layer_scale is not None:
                table += [Pair(f"{theirs}.{gamma}", (f"{ours}.{gamma}",)) for gamma in ("gamma1", "gamma2")]
        table += affine("transformer.ln_f", "norm", bias=options.bias)
        return table if options.tie_head else [*table, Pair(HEAD, ("head.weight",))]


class VisionLayout:
    """Names and shapes of the authors' vision models."""

    kind = "vision"
    options = VisionOptions
    unneeded = ("dropout", "head_dropout", "drop_path", "drop_path_rule", "gradient_checkpointing", "backend")
    in_tensors: tuple[str, ...] = ("mixer", "embed_dim", "depth", "num_heads", "mlp_ratio", "layer_scale")
    in_tensors += ("patch_size", "in_chans", "num_classes", "class_depth", "tokens_norm")
    known: ClassVar[Known] = {"patch_size": (8, 16), "mixer": tuple(MIXERS)}

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

    def read(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options that the tensors decide, and defaults of the authors' code for others."""
        _refuse_relatives(state)
        width, qkv = rows(first(state, "blocks.", ".norm1.weight")), first(state, "blocks.", ".attn.qkv.weight")
        convolutions, entry = count_blocks(state, STEM), state.get(f"{STEM}0.0.weight")
        needed = {
            f"{STEM}0.0.weight": convolutions,
            "blocks.0.norm1.weight": width,
            "blocks.0.attn.qkv.weight": rows(qkv),
        }
        if missing := [name for name, found in needed.items() if not found]:
            raise CheckpointError(f"this is no vision model of the authors; missing: {', '.join(missing)}")
        hidden, depth = rows(first(state, "blocks.", ".mlp.fc1.weight")), count_blocks(state, "blocks.")
        ratio = hidden / width if hidden else 4.0
        gammas = any(name.endswith((".gamma1", ".gamma2")) for name in state)
        decided = {
            "embed_dim": width,
            "depth": depth,
            # The next number where the product is rounded down.
            "mlp_ratio": ratio if not hidden or int(width * ratio) == hidden else math.nextafter(ratio, math.inf),
            "patch_size": 2**convolutions,
            "in_chans": entry.shape[1] if entry is not None and entry.dim() == 4 else 3,
            "num_classes": rows(first(state, "head.", "")),
            "class_depth": count_blocks(state, "cls_attn_blocks."),
            "feed_forward": "mlp",
            **_mixer(state, rows(qkv), width),
        }
        # Layer scales of deep models start small. All softmax models of the authors have 8 heads.
        scale = (1.0 if depth <= 12 else 1e-5) if gammas else None
        return decided, {"layer_scale": scale, "num_heads": 8, "tokens_norm": True}

    def pairs(self, options: Any) -> list[Pair]:
        """Return the table for a model with these options."""
        table = [Pair("cls_token", ("cls_token",))]
        for i in range(0, 2 * options.patch_size.bit_length() - 3, 2):
            conv, norm = f"{STEM}{i}.0", f"{STEM}{i}.1"
            statistics = ("running_mean", "running_var", "num_batches_tracked")
            table += affine(conv, conv, bias=False) + affine(norm, norm)
            table += [Pair(f"{norm}.{name}", (f"{norm}.{name}",)) for name in statistics]
        table += affine("pos_embeder.token_projection", "pos_embed.token_projection")
        gammas = () if options.layer_scale is None else ("gamma1", "gamma2")
        back, temperature, ones = MIXERS[options.mixer]
        layers = {"norm1": "norm1", "attn.qkv": "attention.proj_in", f"attn.{back}": "attention.proj_out"}
        layers |= {"norm2": "norm2", "mlp.fc1": "mlp.proj_in", "mlp.fc2": "mlp.proj_out"}
        for i in range(options.depth):
            block = f"blocks.{i}"
            for theirs, ours in layers.items():
                table += affine(f"{block}.{theirs}", f"{block}.{ours}")
            if temperature is not None:
                table += [Pair(f"{block}.attn.{temperature}", (f"{block}.attention.temperature",), ones)]
            table += [Pair(f"{block}.{gamma}", (f"{block}.{gamma}",)) for gamma in gammas]
        for i in range(options.class_depth):
            block = f"cls_attn_blocks.{i}"
            for name in ("norm1", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
                table += affine(f"{block}.{name}", f"{block}.{name}")
            table += affine(f"{block}.attn.qkv", *(f"{block}.attn.{part}" for part in "qkv"))
            table += [Pair(f"{block}.{gamma}", (f"{block}.{gamma}",)) for gamma in gammas]
        return table + affine("norm", "norm") + (affine("head", "head") if options.num_classes else [])


Layout = LanguageLayout | VisionLayout


def lacking(layout: Layout, options: Any) -> list[str]:
    """Return ``name=value`` of the options that the authors' code lacks, though the tensors would not show it."""
    fields = type(options).model_fields
    names = [name for name in fields if name not in (*layout.in_tensors, *layout.unneeded)]
    wrong = [name for name in names if getattr(options, name) != fields[name].default]
    # Their code would overwrite the weights of an untied head silently.
    known = layout.known
    wrong += [name for name in known if getattr(options, name) not in known[name]]
    return [f"{name}={getattr(options, name)}" for name in wrong]


def affine(theirs: str, *ours: str, bias: bool = True) -> list[Pair]:
    """Pair the weight, and the bias if there is one, of a linear layer or a norm."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Pair(f"{theirs}.{kind}", tuple(f"{name}.{kind}" for name in ours)) for kind in kinds]


def first(state: State, start: str, end: str) -> Tensor | None:
    """Return the first tensor whose name starts and ends like this; None if there is none."""
    return next((tensor for name, tensor in state.items() if name.startswith(start) and name.endswith(end)), None)


def rows(tensor: Tensor | None) -> int:
    """Return the length of a tensor's first axis; 0 if there is none."""
    return 0 if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def count_blocks(state: State, prefix: str) -> int:
    """Count the different numbers behind `prefix`; the highest one could be a million in a single odd name."""
    found = {name.removeprefix(prefix).partition(".")[0] for name in state if name.startswith(prefix)}
    return sum(number.isdecimal() for number in found)


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
    """Raise a helpful error for similar, unsupported checkpoints."""
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


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and (a is b or torch.equal(a, b))


def list_names(names: Iterable[str]) -> str:
    """Join names, but not more than fit into a message."""
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return ", ".join(listed[:MOST_NAMES]) + more


def to_ours(pairs: Sequence[Pair], state: State, model: nn.Module, what: str) -> dict[str, Tensor]:
    """Convert the authors' tensors to ours."""
    needed = model.state_dict()
    names = {pair.theirs for pair in pairs}
    missing = [pair.theirs for pair in pairs if pair.theirs not in state]
    unused = [name for name in state if name not in names]
    wrong: list[str] = []
    result: dict[str, Tensor] = {}
    for pair in pairs:
        if pair.theirs not in state:
            continue
        tensor, places = state[pair.theirs].detach(), [needed[name] for name in pair.ours]
        if problem := _misfit(tensor, places, pair.ones):
            wrong.append(f"{pair.theirs} {problem}")
            continue
        pieces = tensor.chunk(len(places)) if len(places) > 1 else (tensor,)
        for name, piece, place in zip(pair.ours, pieces, places, strict=True):
            # A model owns its memory: pieces share theirs with each other, and the caller's tensors with the caller.
            result[name] = piece.reshape(place.shape).clone(memory_format=torch.contiguous_format)
    if missing or unused or wrong:
        lines = [f"this is not a whole checkpoint of the authors' {what}, so nothing was loaded:"]
        lines += [f"missing: {list_names(missing)}"] if missing else []
        lines += [f"not used: {list_names(unused)}"] if unused else []
        raise CheckpointError("\n  ".join(lines + wrong[:MOST_NAMES]))
    return result


def to_theirs(pairs: Sequence[Pair], state: State) -> dict[str, Tensor]:
    """Convert our tensors to the authors', with memory of their own."""
    covered = [name for pair in pairs for name in pair.ours]
    if strange := [name for name in state if name not in set(covered)]:
        raise CheckpointError(f"the authors' models have no place for {list_names(strange)}")
    if missing := [name for name in covered if name not in state]:
        raise CheckpointError(f"this model has been changed since it was built, it lacks {list_names(missing)}")
    result: dict[str, Tensor] = {}
    for pair in pairs:
        parts = [state[name].detach() for name in pair.ours]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
        result[pair.theirs] = whole.reshape((*whole.shape, *(1,) * pair.ones))
    return result


def _misfit(tensor: Tensor, places: Sequence[Tensor], ones: int) -> str | None:
    """Return why the authors' tensor cannot be split into our tensors; None if it can."""
    if places[0].is_floating_point() and not tensor.is_floating_point():
        return f"has dtype {tensor.dtype}; a floating-point type is needed"
    if not places[0].is_floating_point() and tensor.dtype != places[0].dtype:
        return f"has dtype {tensor.dtype}; {places[0].dtype} is needed"
    shape = tuple(places[0].shape)
    whole = (len(places) * shape[0], *shape[1:]) if shape else ()
    # Axes of length 1 at the end carry nothing, and come and go between versions of the code.
    accepted = {whole, (*whole, 1), (*whole, 1, 1)} if ones else {whole}
    if tuple(tensor.shape) in accepted:
        return None
    return f"has shape {tuple(tensor.shape)}; {whole + (1,) * ones} is needed"
