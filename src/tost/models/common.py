"""Shared by the models: checks of inputs, construction of mixers, the count of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.models.flops import token_flops
from tost.models.mixers import MixerOptions
from tost.models.options import ConvolutionOptions, MixedOptions
from tost.nn import GridConvolution, LearnedPositions, SequenceConvolution
from tost.ops._transforms import has_values

INTEGERS = (torch.int64, torch.int32)


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise for anything but token ids [B, N] within the vocabulary."""
    if ids.dim() != 2 or ids.dtype not in INTEGERS:
        raise ValueError(
            f"ids have shape {tuple(ids.shape)} and dtype {ids.dtype}; this model needs token ids [B, N] of dtype "
            "torch.int64. Use ids[None] for a single sequence, ids.long() for another dtype."
        )
    if ids.numel() == 0 or not has_values(ids):
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"ids reach from {low} to {high}, but this model has vocab_size={vocab_size}, so ids from 0 to "
            f"{vocab_size - 1}. Use the tokenizer that the model was made for, or build it with a larger vocab_size."
        )


def build_mixer(options: MixedOptions, *, drop: float | None = None, **chosen: Any) -> nn.Module:
    """Build the mixer of a block.

    Args:
        options: Options of the model.
        drop: Dropout on attention weights; None for that of the model.
        **chosen: Further arguments, for mixers whose constructor names them.

    Returns:
        A module that is called as ``mixer(x, mask)``.
    """
    factory, own = options.mixer_spec().factory(), options.all_mixer_options()
    inner = options.dropout if drop is None else drop
    offered: dict[str, Any] = dict.fromkeys(("attn_drop", "gain_drop"), inner)
    offered |= {"out_drop": options.dropout, "drop": options.dropout, "backend": options.backend, **chosen}
    named = _arguments_of(factory)
    if chosen.get("value_conv") is not None and "value_conv" not in named:
        raise ConfigError(
            f"conv_at=values adds a convolution to the values of a mixer, but mixer={options.mixer} takes none; "
            "use another place, such as conv_at=block."
        )
    arguments = own.arguments() if isinstance(own, MixerOptions) else dict(own)
    taken = {name: value for name, value in offered.items() if name in named}
    return factory(options.embed_dim, options.num_heads, **taken, **arguments)


def build_convolutions(
    options: ConvolutionOptions, kind: type[GridConvolution | SequenceConvolution]
) -> dict[str, Any]:
    """Build the convolutions of a block: arguments of `Block`, and `value_conv` of its mixer."""
    places = {"conv": "attention", "conv_mlp": "mlp", "conv_block": "block", "value_conv": "values"}
    return {
        name: kind(options.embed_dim, width=options.conv_width) if options.has_convolution(place) else None
        for name, place in places.items()
    }


def _arguments_of(factory: Callable[..., Any]) -> set[str]:
    """Return the names of a constructor's arguments, including its bases as long as ``**`` passes them on."""
    names: set[str] = set()
    for one in inspect.getmro(factory) if inspect.isclass(factory) else (factory,):
        found = inspect.signature(one).parameters
        names |= set(found)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values()):
            break
    return names


class TokenModel(nn.Module):
    """What language models and sequence classifiers share: counts of parameters and operations."""

    options: MixedOptions

    def num_parameters(self, *, positions: bool = False) -> int:
        """Count the trainable parameters, a tied head once.

        Args:
            positions: Count the learned positions too, which published sizes leave out.
        """
        return count_parameters(self, positions=positions)

    def flops_per_token(self) -> int:
        """Count the operations of a forward pass per token; see `tost.models.token_flops`."""
        return token_flops(self.options).total


def count_parameters(model: nn.Module, *, positions: bool) -> int:
    """Count the trainable parameters of a model, each once, with or without its learned positions."""
    tables = [module.weight for module in model.modules() if isinstance(module, LearnedPositions)]
    if isinstance(table := getattr(model, "pos_embed", None), nn.Parameter):  # timm's name, in image models
        tables.append(table)
    skipped = set() if positions else set(map(id, tables))
    return sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in skipped)
