"""One door to all analyses: which of them apply to a model, and how each is run on given samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tost.analysis.gains import gains_by_layer
from tost.analysis.heads import head_usage, membership_flattening
from tost.analysis.memberships import membership_maps, text_memberships
from tost.analysis.memory import state_memory
from tost.analysis.rates import CodingRates, coding_rate_by_layer
from tost.analysis.records import Batch, attention_layers
from tost.analysis.registry import ANALYSES, Analysis, find_analysis
from tost.analysis.result import Result
from tost.analysis.subspaces import subspace_coherence
from tost.errors import ConfigError
from tost.nn import CausalTSSAttention

if TYPE_CHECKING:
    from tost.analysis.class_attention import ClassAttentionMaps

__all__ = ["Samples", "analyse", "applicable", "control_of", "require", "why_not"]


@dataclass(frozen=True)
class Samples:
    """What a model is looked at with. Batches are gone through once per analysis, so pass a list or the like.

    Attributes:
        train: Batches of training samples; None if there are none.
        validation: Batches of validation samples; None if there are none.
        pixels: The validation images in [0, 1], ``[S, 3, height, width]``, to be drawn; None if batches have them as
            ``"pixels"``, or to draw the inputs.
        text: A text as ids ``[1, N]`` and as one string per token; None if there is none.
    """

    train: Iterable[Batch] | None = None
    validation: Iterable[Batch] | None = None
    pixels: Tensor | None = None
    text: tuple[Tensor, Sequence[str]] | None = None

    def any(self) -> Iterable[Batch]:
        """Return the validation samples, or the training samples if there are no others.

        Raises:
            ConfigError: There are none at all.
        """
        batches = self.train if self.validation is None else self.validation
        if batches is None:
            raise ConfigError("this analysis looks at samples, but there are none; give images, a text or a run.")
        return batches


def applicable(model: nn.Module) -> list[str]:
    """Return the analyses that make sense for a model, by name."""
    return [name for name in ANALYSES if why_not(model, name) is None]


def why_not(model: nn.Module, name: str) -> str | None:
    """Return why an analysis does not apply to a model; None if it does.

    Raises:
        ConfigError: There is no such analysis.
    """
    analysis = find_analysis(name)
    images = _is_image_model(model)
    if analysis.data == "images" and not images:
        return "it looks at images, and the model does not"
    if analysis.data == "text" and not _reads_tokens(model):
        return "it looks at a text, and the model does not read tokens"
    if analysis.needs == "class":
        return None if _class_layers(model) else "no class token looks at patches in this model"
    layers = attention_layers(model)
    if not layers:
        return "the model has no TSSA layers"
    if analysis.needs == "causal" and not all(isinstance(x.attention, CausalTSSAttention) for x in layers):
        return "only causal TSSA layers have a state"
    if analysis.needs == "blocks" and any(layer.block is None for layer in layers):
        return "the attention does not stand in residual blocks of this package"
    return None


def require(model: nn.Module, name: str) -> Analysis:
    """Return an analysis that applies to a model.

    Raises:
        ConfigError: There is no such analysis, or it does not apply; the message names those that do.
    """
    reason = why_not(model, name)
    if reason is not None:
        others = ", ".join(applicable(model)) or "none"
        raise ConfigError(f"{name} does not apply to {type(model).__name__}: {reason}. These do: {others}.")
    return ANALYSES[name]


def _is_image_model(model: nn.Module) -> bool:
    return hasattr(model, "patch_embed")


def _reads_tokens(model: nn.Module) -> bool:
    options = getattr(model, "options", None) or getattr(model, "config", None)
    return getattr(options, "vocab_size", None) is not None


def _class_layers(model: nn.Module) -> bool:
    from tost.analysis.class_attention import class_attention_layers  # loads timm, which takes seconds

    return bool(class_attention_layers(model))


def control_of(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Return an untrained model with the same options, to tell what learning has changed from what was there before.

    Args:
        model: A model of this package.
        seed: Decides the weights.

    Raises:
        ConfigError: The model does not know its options, as those of other packages do not.
    """
    options = getattr(model, "options", None)
    if options is None:
        raise ConfigError(f"{type(model).__name__} does not say how it was built, so there is no untrained one of it.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh: nn.Module = type(model)(options)
    return fresh.eval()


def analyse(
    name: str,
    model: nn.Module,
    samples: Samples,
    *,
    layers: Sequence[int] | None = None,
    control: nn.Module | None = None,
) -> Result:
    """Run one analysis.

    Args:
        name: Which; see `tost.analysis.ANALYSES`.
        model: The model.
        samples: What to look at.
        layers: Which layers; None for what is usual.
        control: An untrained model to be measured beside it, where that makes sense; see `control_of`.

    Returns:
        The result; `tost.analysis.save` writes it.

    Raises:
        ConfigError: There is no such analysis, it does not apply to this model, or it lacks samples.
    """
    analysis = require(model, name)
    result: Result = _RUN[analysis.name](analysis, model, samples, layers, control)
    return result


_Layers = Sequence[int] | None
_Control = nn.Module | None


def _rates(analysis: Analysis, model: nn.Module, samples: Samples, layers: _Layers, control: _Control) -> CodingRates:
    splits = {"train": samples.train, "validation": samples.validation}
    given = {split: batches for split, batches in splits.items() if batches is not None}
    if not given:
        samples.any()
    found = [coding_rate_by_layer(model, batches, layers=layers, split=split) for split, batches in given.items()]
    if control is not None:
        split = "validation" if "validation" in given else "train"
        found.append(coding_rate_by_layer(control, given[split], layers=layers, split=split, source="control"))
    return reduce(add, found)


def _membership_maps(
    analysis: Analysis, model: nn.Module, samples: Samples, layers: _Layers, control: _Control
) -> Result:
    pixels = samples.pixels if samples.validation is not None else None
    return membership_maps(model, samples.any(), layers=layers, pixels=pixels)


def _class_attention(
    analysis: Analysis, model: nn.Module, samples: Samples, layers: _Layers, control: _Control
) -> ClassAttentionMaps:
    from tost.analysis.class_attention import class_attention_maps

    pixels = samples.pixels if samples.validation is not None else None
    return class_attention_maps(model, samples.any(), layers=layers, pixels=pixels)


def _text(analysis: Analysis, model: nn.Module, samples: Samples, layers: _Layers, control: _Control) -> Result:
    if samples.text is None:
        raise ConfigError(f"{analysis.name} looks at a text, but there is none; give one.")
    ids, tokens = samples.text
    return text_memberships(model, ids, tokens, layers=layers)


def _subspaces(analysis: Analysis, model: nn.Module, samples: Samples, layers: _Layers, control: _Control) -> Result:
    return subspace_coherence(model, layers=layers)


def _on_samples(function: Callable[..., Result]) -> Callable[..., Result]:
    def run(analysis: Analysis, model: nn.Module, samples: Samples, layers: _Layers, control: _Control) -> Result:
        return function(model, samples.any(), layers=layers)

    return run


_RUN: dict[str, Callable[..., Any]] = {
    "coding-rate": _rates,
    "membership-maps": _membership_maps,
    "text-memberships": _text,
    "class-attention": _class_attention,
    "subspaces": _subspaces,
    "gains": _on_samples(gains_by_layer),
    "heads": _on_samples(head_usage),
    "flattening": _on_samples(membership_flattening),
    "state-memory": _on_samples(state_memory),
}
