"""Replace the self-attention of models of timm and transformers by TSSA."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, TypeVar, get_args

from torch import nn

from tost.errors import ConfigError
from tost.integrations.replace.parts import TIMM, TRANSFORMERS, Attention, Source, build_attention

__all__ = ["replace_attention"]

Model = TypeVar("Model", bound=nn.Module)

_LIBRARIES = {"timm": "tost.integrations.replace.timm", "transformers": "tost.integrations.replace.transformers"}


class Layer(NamedTuple):
    """A self-attention layer of a model.

    Attributes:
        name: Where it is in the model.
        module: The layer itself.
        library: The part of this package that can replace it; None if it is replaced already.
    """

    name: str
    module: nn.Module
    library: ModuleType | None


def replace_attention(
    model: Model,
    *,
    layers: Iterable[int] | None = None,
    causal: bool | None = None,
    num_heads: int | None = None,
    source: Source = "value",
    plus: bool = False,
    block_size: int = 8,
    backend: str = "auto",
) -> Model:
    """Replace self-attention by TSSA, in place.

    Models of timm (ViT, DeiT, BEiT, Swin) and transformers (BERT, RoBERTa, DistilBERT, ELECTRA, ViT, GPT-2, Llama,
    Mistral, Qwen2, Qwen3) are known. Each new layer starts from the old one: its projection is the negative of that to
    the values (grouped heads get a copy each), since the operator turns the sign; the output projection is the old
    module itself. Queries, keys and what acts on scores between pairs of tokens (rotary positions, relative position
    biases, dropout of weights) are gone; a warning names them. The model computes something else from then on and has
    to be trained, see ``examples/distill.py``.

    Causal layers generate from a state of constant size in the cache of transformers.

    Args:
        model: A model of timm or transformers.
        layers: Which layers, counted from 0 in the order of the model, or from the end if negative; all by default.
            The others stay as they are. Call again for layers with other options.
        causal: Let each token see only those before it; by default as in the old layer.
        num_heads: Number of heads (groups); by default as in the old layer.
        source: Which projection of the old layer the new one starts from.
        plus: Use the form that carries content in place of the paper's: `tost.GatedTSSAttention` in causal layers,
            `tost.BlockTSSAttention` in others. The heads together have to be as wide as the tokens.
        block_size: Features in a block, with `plus`; divides the width of a head.
        backend: Implementation of the operator, see `tost.tssa`.

    Returns:
        The model.

    Raises:
        ConfigError: The model has no layer that can be replaced, not the layers asked for, or a layer has something
            that TSSA has no place for. The model is as it was.

    Example:
        >>> import tost, tost.integrations.timm, timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=3)
        >>> model = tost.replace_attention(model, layers=[0, 2])
        >>> type(model.blocks[0].attn).__name__, type(model.blocks[1].attn).__name__
        ('TSSAttention', 'Attention')
    """
    if source not in get_args(Source):
        raise ConfigError(f"source={source!r} is not known; a layer can start from its 'value', 'query' or 'key'.")
    found = list(find_layers(model))
    chosen = _choose(found, layers, model)
    made: dict[str, nn.Module] = {}
    dropped: dict[str, None] = {}
    for name, module, library in chosen:
        assert library is not None
        parts = library.read(module)
        attention = build_attention(
            parts,
            causal=parts.causal if causal is None else causal,
            num_heads=parts.num_heads if num_heads is None else num_heads,
            source=source,
            block_size=block_size if plus else None,
            backend=backend,
        )
        made[name] = library.wrap(attention.train(module.training), module)
        dropped |= dict.fromkeys(parts.dropped)
    for name, module in made.items():
        model.set_submodule(name, module)
    if chosen[0].library is not None and hasattr(chosen[0].library, "finish"):
        record = {
            "layers": [place for place, layer in enumerate(found) if layer in chosen],
            "causal": causal,
            "num_heads": num_heads,
            "plus": plus,
            "block_size": block_size,
        }
        chosen[0].library.finish(model, record)
    if dropped:
        warnings.warn(
            f"{' and '.join(dropped)} acted on scores between pairs of tokens, which TSSA does not have, and are gone. "
            "Without other positions the model has a set of tokens, or a causal sequence.",
            stacklevel=2,
        )
    return model


def find_layers(model: nn.Module) -> Iterator[Layer]:
    """Find the self-attention layers, replaced ones too, in the order of the model."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, Attention) or type(module).__module__.startswith(__name__ + "."):
            inside = f"{name}."
            yield Layer(name, module, None)
        elif (library := _LIBRARIES.get(type(module).__module__.partition(".")[0])) is not None:
            loaded = import_module(library)
            if loaded.read(module) is not None:
                inside = f"{name}."
                yield Layer(name, module, loaded)


def _choose(found: list[Layer], layers: Iterable[int] | None, model: nn.Module) -> list[Layer]:
    if not any(layer.library for layer in found):
        if found:
            raise ConfigError("all self-attention layers of this model are replaced already.")
        seen = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
        known = ", ".join([*(f"timm's {family}" for family in TIMM.values()), *TRANSFORMERS])
        raise ConfigError(
            f"no self-attention of {type(model).__name__} can be replaced: it has "
            f"{', '.join(seen) or 'no module with that name'}. Known are {known}. In a model of your own put "
            "tost.TSSAttention or tost.CausalTSSAttention in its place."
        )
    if layers is None:
        return [layer for layer in found if layer.library is not None]
    places = sorted({place + len(found) if place < 0 else place for place in layers})
    if not places or places[0] < 0 or places[-1] >= len(found):
        raise ConfigError(
            f"layers={list(places)}, but the model has {len(found)} self-attention layers; choose from 0 to "
            f"{len(found) - 1}, or leave it out for all."
        )
    again = [place for place in places if found[place].library is None]
    if again:
        raise ConfigError(f"layers {again} are replaced already; choose others, or start from the model as it was.")
    return [found[place] for place in places]
