"""The authors' language models (the layout of nanoGPT, with TSSA or softmax attention) and `LanguageToST`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tost.errors import CheckpointError
from tost.integrations.official._table import Layout, Pair, State, affine, changed_options, count_blocks, first, rows
from tost.models import LanguageOptions

HEAD = "lm_head.weight"
TOKENS = "transformer.wte.weight"
POSITIONS = "transformer.wpe.weight"
BLOCKS = "transformer.h."
HEAD_DIM = 64
"""Width of the heads of every GPT-2, which the tensors of softmax attention do not tell."""

# Other names, inside a block, of the tensors that ToST added to nanoGPT.
ALIASES = {
    **{alias: f"gamma{i}" for i in (1, 2) for alias in (f"gamma_{i}", f"ls_{i}.gamma", f"ls{i}.gamma")},
    **{"attn.temperature": "attn.temp", "attn.bias": "attn.denom_bias"},
}
# What the tensors' names and shapes carry, and what does not matter to a trained model.
FREE = (
    "mixer",
    "embed_dim",
    "depth",
    "num_heads",
    "mlp_ratio",
    "vocab_size",
    "max_length",
    "layer_scale",
    "bias",
    "tie_head",
)
HARMLESS = ("dropout", "gradient_checkpointing", "backend")


class LanguageLayout(Layout):
    """Names and shapes of ``model_TSSA.py``, and of the GPT that it is compared with: softmax attention, LayerScale."""

    kind = "language"
    options = LanguageOptions

    def likeness(self, state: State) -> int:
        """Count the names of nanoGPT's layout."""
        return sum(name.startswith("transformer.") for name in state)

    def canonical(self, state: State) -> dict[str, Tensor]:
        """Resolve aliases, drop what is there twice, and cut position biases to the positions.

        The authors' ``crop_block_size`` shortens the table of positions and forgets the biases; what is cut from them
        here was never read.

        Raises:
            CheckpointError: A tensor is there under two of its names.
        """
        result: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if name.startswith(BLOCKS) and name.endswith(".attn.bias") and tensor.dim() == 4:
                continue  # the causal mask of softmax attention, where torch has no fused one
            known = _known_name(name)
            if known in result:
                raise CheckpointError(f"the checkpoint holds {known} under two names, one of them {name}")
            result[known] = tensor
        # The head is the embedding; a file that stores shared tensors once may have kept either name.
        if HEAD in result and (TOKENS not in result or _equal(result[HEAD], result[TOKENS])):
            result[TOKENS] = result.pop(HEAD)
        if length := rows(result.get(POSITIONS)):
            biases = {n: t[:, :length] for n, t in result.items() if n.endswith(".attn.denom_bias") and t.dim() > 1}
            result |= biases
        return result

    def told(self, state: State) -> dict[str, Any]:
        """Return the sizes, and whether there are biases, gammas and a head of its own.

        Raises:
            CheckpointError: The sizes cannot be found.
        """
        tokens, projection = state.get(TOKENS), first(state, BLOCKS, ".attn.c_attn.weight")
        missing = [name for name in (TOKENS, POSITIONS) if not rows(state.get(name))]
        missing += [f"{BLOCKS}0.attn.c_attn.weight"] if projection is None else []
        if tokens is None or tokens.dim() != 2 or projection is None or missing:
            raise CheckpointError(f"this is no language model of the authors; missing: {', '.join(missing) or TOKENS}")
        width = tokens.shape[1]
        softmax = rows(projection) == 3 * width  # a query, a key and a value per token
        temperature, hidden = first(state, BLOCKS, ".attn.temp"), first(state, BLOCKS, ".mlp.c_fc.weight")
        heads = {} if softmax else {"num_heads": 1 if temperature is None else temperature.numel()}
        return {
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

    def assumed(self, state: State) -> dict[str, Any]:
        """Return the initial layer scale; the trained one is in the file, if there is one. Heads are GPT-2's."""
        gammas = any(name.endswith((".gamma1", ".gamma2")) for name in state)
        return {"layer_scale": 1e-5 if gammas else None, "num_heads": max(1, state[TOKENS].shape[1] // HEAD_DIM)}

    def pairs(self, options: LanguageOptions) -> list[Pair]:
        """Return the table for a model with these options."""
        bias = options.bias
        table = [Pair(TOKENS, ("tokens.weight",)), Pair(POSITIONS, ("positions.weight",))]
        for i in range(options.depth):
            theirs, ours = f"{BLOCKS}{i}", f"blocks.{i}"
            table += affine(f"{theirs}.ln_1", f"{ours}.norm1", bias=bias)
            table += affine(f"{theirs}.attn.c_attn", f"{ours}.attention.proj_in", bias=bias)
            if options.mixer == "tssa":
                table += [Pair(f"{theirs}.attn.temp", (f"{ours}.attention.temperature",), ones=1)]
                table += [Pair(f"{theirs}.attn.denom_bias", (f"{ours}.attention.position_bias",), ones=1)]
            table += affine(f"{theirs}.attn.c_proj", f"{ours}.attention.proj_out", bias=bias)
            table += affine(f"{theirs}.ln_2", f"{ours}.norm2", bias=bias)
            table += affine(f"{theirs}.mlp.c_fc", f"{ours}.mlp.proj_in", bias=bias)
            table += affine(f"{theirs}.mlp.c_proj", f"{ours}.mlp.proj_out", bias=bias)
            if options.layer_scale is not None:
                table += [Pair(f"{theirs}.{gamma}", (f"{ours}.{gamma}",)) for gamma in ("gamma1", "gamma2")]
        table += affine("transformer.ln_f", "norm", bias=bias)
        return table if options.tie_head else [*table, Pair(HEAD, ("head.weight",))]

    def lacks(self, options: LanguageOptions) -> list[str]:
        """Return what would be lost: a head of its own too, which the authors' code would overwrite without a word."""
        mixer = [] if options.mixer in ("tssa", "softmax") else [f"mixer={options.mixer}"]
        return mixer + changed_options(options, (*FREE, *HARMLESS)) + ([] if options.tie_head else ["tie_head=False"])

    def complete(self, tensors: dict[str, Tensor], options: LanguageOptions) -> dict[str, Tensor]:
        """Add the head, which the authors' state dict names besides the embedding that it is."""
        return {**tensors, HEAD: tensors[TOKENS]}


def _known_name(name: str) -> str:
    place = re.fullmatch(rf"({re.escape(BLOCKS)}\d+\.)(.+)", name)
    if place is None or place[2] not in ALIASES:
        return name
    return place[1] + ALIASES[place[2]]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and (a is b or torch.equal(a, b))
