"""Names of models: what they stand for, and how one is made of them. Loads no torch until a model is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tost._options import check_options, options_error
from tost.errors import ConfigError
from tost.models.options import LanguageOptions, ModelOptions, SequenceClassifierOptions
from tost.models.sequence.specs import LONG_RANGE
from tost.models.vision.options import CrateOptions, VisionOptions, VitOptions

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelSpec", "create_model", "list_models", "model_options", "model_spec"]


@dataclass(frozen=True)
class ModelSpec:
    """A registered model.

    Attributes:
        name: What users call it.
        family: Which options it takes: ``"language"``, ``"classifier"``, ``"vision"``, ``"crate"`` or ``"vit"``.
        defaults: Its options, where they differ from those of the family.
        description: One line for listings.
        build: The class that is built, as ``"module:name"`` below ``tost.models``.
    """

    name: str
    family: str
    defaults: Mapping[str, Any]
    description: str
    build: str


OPTIONS: dict[str, type[ModelOptions]] = {
    "language": LanguageOptions,
    "classifier": SequenceClassifierOptions,
    "vision": VisionOptions,
    "crate": CrateOptions,
    "vit": VitOptions,
}
_LANGUAGE_MODEL = "language.model:LanguageToST"
BUILDERS = {"vision": "vision.model:VisionToST", "crate": "vision.crate:CRATE", "vit": "vision.vit:ViT"}


# What each kind of language model adds to the authors'. The last is ours, for quality at the same linear cost.
_LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "tost_lm_{}": ("causal language model", {}),
    "gpt2_{}": ("GPT-2: softmax attention in the same blocks", {"mixer": "softmax", "layer_scale": None}),
    "tost_lm_{}_plus": (
        "tost_lm with our options: convolution, gate, forgetting",
        {"local": 4, "gate": True, "count_scaled": True, "forget": True, "layer_scale": None},
    ),
}


def _language(size: str, embed_dim: int, depth: int, num_heads: int, *parameters: str) -> list[ModelSpec]:
    """Describe the language models of one size; `parameters` are their counts, in the order of the kinds."""
    sizes = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
    return [
        ModelSpec(
            name.format(size), "language", sizes | more, f"{what}, {count} parameters", "language.model:LanguageToST"
        )
        for (name, (what, more)), count in zip(_LANGUAGE.items(), parameters, strict=True)
    ]


def _classifier(name: str, description: str, defaults: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(name, "classifier", defaults, description, "sequence.model:SequenceClassifier")


def _image(name: str, family: str, description: str, sizes: tuple[int, int, int], **more: Any) -> ModelSpec:
    defaults = dict(zip(("embed_dim", "depth", "num_heads"), sizes, strict=True)) | more
    return ModelSpec(name, family, defaults, description, BUILDERS[family])


def _vision(name: str, description: str, sizes: tuple[int, int, int], **more: Any) -> list[ModelSpec]:
    """Describe a model of the paper in both patch sizes; the deep ones start with small layer scales."""
    scale = 1.0 if sizes[1] <= 12 else 1e-5
    return [
        _image(f"{name}_patch{patch}_224", "vision", description, sizes, patch_size=patch, layer_scale=scale, **more)
        for patch in (16, 8)
    ]


_MINI = {"patch_size": 4, "num_classes": 10}
_IMAGE_SPECS = (
    *_vision("tost_tiny", "image classifier, 5.8M parameters", (192, 12, 4)),
    *_vision("tost_small", "image classifier, 22.6M parameters", (384, 12, 8)),
    *_vision("tost_medium", "image classifier, 71.5M parameters", (512, 24, 8)),
    *_vision("tost_tiny_24", "image classifier, 24 layers, 10.2M parameters", (192, 24, 4)),
    *_vision("tost_small_24", "image classifier, 24 layers, 40.3M parameters", (384, 24, 8)),
    *_vision("tost_large", "image classifier, 24 layers, 160M parameters", (768, 24, 16)),
    _vision("xcit_small_nolpi", "XCiT without local interaction, 26.1M parameters", (384, 12, 8), mixer="xca")[0],
    _vision("xcit_medium_nolpi", "XCiT without local interaction, 84.1M parameters", (512, 24, 8), mixer="xca")[0],
    _image("crate_tiny_patch16_224", "crate", "white-box image classifier, 6.1M parameters", (384, 12, 6)),
    _image("crate_small_patch16_224", "crate", "white-box image classifier, 13.1M parameters", (576, 12, 12)),
    _image("crate_base_patch16_224", "crate", "white-box image classifier, 22.8M parameters", (768, 12, 12)),
    _image("crate_large_patch16_224", "crate", "white-box image classifier, 77.6M parameters", (1024, 24, 16)),
    _image("vit_small_patch16_224", "vit", "timm's vision transformer, 22.1M parameters", (384, 12, 6)),
    _image("vit_base_patch16_224", "vit", "timm's vision transformer, 86.6M parameters", (768, 12, 12)),
    _image("deit_small_patch16_224", "vit", "the same network as vit_small, under DeiT's name", (384, 12, 6)),
    _image("deit_base_patch16_224", "vit", "the same network as vit_base, under DeiT's name", (768, 12, 12)),
    # Small images on a CPU: 0.38M parameters each, within 2 % of each other, for 10 classes of 32 x 32 pixels.
    _image("tost_mini", "vision", "ToST for images of 28 to 64 pixels, 0.38M parameters", (64, 6, 4), **_MINI),
    _image("softmax_mini", "vision", "tost_mini with softmax attention", (64, 5, 4), mixer="softmax", **_MINI),
    _image("xcit_mini", "vision", "tost_mini with cross-covariance attention", (64, 5, 4), mixer="xca", **_MINI),
    _image(
        "vit_mini",
        "vit",
        "plain ViT as large as tost_mini, without its convolutions",
        (64, 7, 4),
        mlp_ratio=4.25,
        image_size=32,
        **_MINI,
    ),
    _image("crate_mini", "crate", "CRATE as large as tost_mini", (140, 6, 4), image_size=32, **_MINI),
)

_SPECS = (
    *_IMAGE_SPECS,
    *_language("base", 768, 12, 12, "110M", "124M", "117M"),
    *_language("medium", 1024, 24, 16, "304M", "354M", "329M"),
    *_language("large", 1280, 36, 20, "655M", "772M", "714M"),
    *(_classifier(*spec) for spec in LONG_RANGE),
)
_BY_NAME = {spec.name: spec for spec in _SPECS}


def list_models(pattern: str = "*") -> list[str]:
    """List the registered models.

    Args:
        pattern: Which ones, with the wildcards of a shell.

    Returns:
        Names in alphabetical order.

    Example:
        >>> import tost
        >>> tost.list_models("gpt2_*")
        ['gpt2_base', 'gpt2_large', 'gpt2_medium']
    """
    return sorted(name for name in _BY_NAME if fnmatchcase(name, pattern))


def model_spec(name: str) -> ModelSpec:
    """Return what is registered under a name.

    Raises:
        ConfigError: There is no such model; the message names the nearest.
    """
    if name not in _BY_NAME:
        raise ConfigError(
            f"there is no model {name!r}{_did_you_mean(name, _BY_NAME)} The models are: {', '.join(list_models())}."
        )
    return _BY_NAME[name]


def model_options(name: str, overrides: Mapping[str, Any]) -> ModelOptions:
    """Check the options of a model without building it, and without torch.

    Args:
        name: A registered model.
        overrides: Options that replace the model's own.

    Returns:
        All options of the model, of the class that its family takes.

    Raises:
        ConfigError: There is no such model, or the options are not usable; every problem is in the message.
    """
    spec = model_spec(name)
    options, problems = check_options(OPTIONS[spec.family], {**spec.defaults, **overrides})
    if options is None:
        raise options_error(f"model {name!r} cannot be built with these options", problems)
    return options


def create_model(name: str, **overrides: Any) -> nn.Module:
    """Build a model with fresh weights.

    Device and dtype are torch's defaults; ``with torch.device("meta"):`` builds a model of any size at once.

    Args:
        name: A registered model, see `list_models`.
        **overrides: Options that replace the model's own; they are the fields of ``model.options``.

    Returns:
        The model. Its ``options`` are all the choices that made it.

    Raises:
        ConfigError: There is no such model, or the options are not usable; every problem is in the message.

    Example:
        >>> import torch, tost
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> model(torch.randint(256, (1, 10))).shape
        torch.Size([1, 10, 256])
    """
    options = model_options(name, overrides)
    module, _, factory = model_spec(name).build.partition(":")
    model: nn.Module = getattr(import_module(f"tost.models.{module}"), factory)(options)
    return model


def _did_you_mean(word: str, candidates: Iterable[str]) -> str:
    near = get_close_matches(word, list(candidates), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."
