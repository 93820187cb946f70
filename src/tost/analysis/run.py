"""Run an analysis by name, and find those that apply to a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tost.analysis.records import Batch, attention_layers
from tost.analysis.registry import Analysis, find_analysis, list_analyses
from tost.analysis.result import Result
from tost.errors import ConfigError


@dataclass(frozen=True)
class Samples:
    """Samples to analyze a model with. Iterating yields the validation batches, or the training batches without those.

    Every analysis goes through the batches anew, so pass lists or other collections. `tost.analysis.records.Batch`
    lists the forms of a batch; images to be drawn may come with ``"pixels"``, in [0, 1], ``[B, 3, height, width]``.

    Attributes:
        train: Batches of training samples; None if there are none.
        validation: Batches of validation samples; None if there are none.
        text: A text as ids ``[1, N]`` and as one string per token; None if there is none.
    """

    train: Iterable[Batch] | None = None
    validation: Iterable[Batch] | None = None
    text: tuple[Tensor, Sequence[str]] | None = None

    def __iter__(self) -> Iterator[Batch]:
        batches = self.train if self.validation is None else self.validation
        if batches is None:
            raise ConfigError("this analysis looks at samples, but there are none; give images, a text or a run.")
        return iter(batches)


def applicable(model: nn.Module) -> list[str]:
    """Return the names of the analyses that apply to a model."""
    return [name for name in list_analyses() if unsupported_reason(model, name) is None]


def unsupported_reason(model: nn.Module, name: str) -> str | None:
    """Return why an analysis does not apply to a model; None if it does.

    Raises:
        ConfigError: There is no such analysis.
    """
    analysis = find_analysis(name)
    if analysis.data == "images" and not hasattr(model, "patch_embed"):
        return "it looks at images, and the model does not"
    options = getattr(model, "options", None) or getattr(model, "config", None)
    if analysis.data == "text" and getattr(options, "vocab_size", None) is None:
        return "it looks at a text, and the model does not read tokens"
    if analysis.needs == "":
        return None
    if analysis.needs == "class":
        from tost.analysis.class_attention import class_attention_layers  # loads timm, which takes seconds

        return None if class_attention_layers(model) else "no class token looks at patches in this model"
    layers = attention_layers(model)
    if not layers:
        return "the model has no TSSA layers"
    if analysis.needs == "causal" and not all(layer.is_causal for layer in layers):
        return "only causal TSSA layers have a state"
    if analysis.needs == "blocks" and any(layer.block is None for layer in layers):
        return "the attention does not stand in residual blocks of this package"
    return None


def require(model: nn.Module, name: str) -> Analysis:
    """Return an analysis that applies to a model.

    Raises:
        ConfigError: There is no such analysis, or it does not apply; the message names those that do.
    """
    reason = unsupported_reason(model, name)
    if reason is not None:
        others = ", ".join(applicable(model)) or "none"
        raise ConfigError(f"{name} does not apply to {type(model).__name__}: {reason}. These do: {others}.")
    return find_analysis(name)


def control_of(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Return an untrained model with the same options, as a control for what training has changed.

    Args:
        model: A model of this package.
        seed: Seed of the weights.

    Raises:
        ConfigError: The model has no `options`, as those of other packages do not.
    """
    options = getattr(model, "options", None)
    if options is None:
        raise ConfigError(f"{type(model).__name__} does not say how it was built, so there is no untrained one of it.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh: nn.Module = type(model)(options)
    return fresh.eval()


def analyze(
    name: str,
    model: nn.Module,
    samples: Samples,
    *,
    layers: Sequence[int] | None = None,
    control: nn.Module | None = None,
) -> Result:
    """Run an analysis by name.

    Args:
        name: One of `tost.analysis.list_analyses`, or ``package.module:function``.
        model: The model.
        samples: The samples.
        layers: Numbers of the layers; None for the default of the analysis.
        control: An untrained model to measure as well, for analyses that compare with one; see `control_of`.

    Returns:
        The result; `tost.analysis.save` writes it.

    Raises:
        ConfigError: There is no such analysis, it does not apply to this model, or it lacks samples.
    """
    analysis = require(model, name)
    options = {key: value for key, value in (("layers", layers), ("control", control)) if analysis.accepts(key)}
    result = analysis.function()(model, samples, **options)
    if not isinstance(result, Result):
        raise ConfigError(f"{name} returned {type(result).__name__}; an analysis returns a tost.analysis.Result.")
    return result
