"""The registered models and their sizes. Loads no torch.

The paper gives sizes for five tasks of the Long-Range Arena and none for Path-X, which takes those of Pathfinder. Its
table has a column "pre-norm" that most likely repeats a switch of fairseq and not the layout of the blocks; the blocks
here are pre-norm, and ``norm=post`` is the other reading. Where the paper is silent, the choices are those of the two
code bases it builds on: real numbers for images and tokens for Pathfinder, the mean over the real elements, waves or
learned positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tost._lazy import load
from tost.models.options import (
    CrateOptions,
    ImageOptions,
    LanguageOptions,
    MixedOptions,
    SequenceClassifierOptions,
    VisionOptions,
    VitOptions,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A registered model.

    Attributes:
        name: Name in configurations.
        build: The class or function that makes it, or its address as ``"module:Class"``.
        options: Class of its options.
        tasks: The tasks that it can be trained for; None for any.
        defaults: Its options, where they differ from the defaults of `options`.
        description: One line for listings.
        by_keyword: Whether `build` takes the options as keyword arguments, not as one object.
    """

    name: str
    build: str | Callable[..., nn.Module]
    options: type[BaseModel]
    tasks: tuple[str, ...] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    by_keyword: bool = False

    def create(self, options: BaseModel) -> nn.Module:
        """Build the model with these options."""
        build: Callable[..., nn.Module] = load(self.build) if isinstance(self.build, str) else self.build
        return build(**dict(options)) if self.by_keyword else build(options)

    def defaults_for(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults, without options of the default mixer if another one is given."""
        mixer = self.defaults.get("mixer", "tssa")
        if not issubclass(self.options, MixedOptions) or given.get("mixer", mixer) == mixer:
            return dict(self.defaults)
        others = {*self.options.tssa_options(), "mixer_options"}
        return {name: value for name, value in self.defaults.items() if name not in others}


_CLASSES: dict[type[ImageOptions], str] = {
    VisionOptions: "tost.models.vision.tost:VisionToST",
    CrateOptions: "tost.models.vision.baselines:CRATE",
    VitOptions: "tost.models.vision.baselines:ViT",
}


def _image(
    name: str, options: type[ImageOptions], description: str, sizes: tuple[int, int, int], **more: Any
) -> ModelSpec:
    return ModelSpec(
        name=name,
        build=_CLASSES[options],
        options=options,
        tasks=("image_classification",),
        defaults=dict(zip(("embed_dim", "depth", "num_heads"), sizes, strict=True)) | more,
        description=description,
    )


def _vision(name: str, description: str, sizes: tuple[int, int, int], **more: Any) -> list[ModelSpec]:
    """Describe a model of the paper in both patch sizes; the deep ones start with small layer scales."""
    scale = 1.0 if sizes[1] <= 12 else 1e-5
    return [
        _image(
            f"{name}_patch{patch}_224", VisionOptions, description, sizes, patch_size=patch, layer_scale=scale, **more
        )
        for patch in (16, 8)
    ]


_MINI = {"patch_size": 4, "num_classes": 10}
# Extensions to the paper, for quality at the same linear cost.
_PLUS = {"conv_width": 3, "conv_at": "block", "mixer": "tssa_plus"}
IMAGE_MODELS = (
    *_vision("tost_tiny", "image classifier, 5.8M parameters", (192, 12, 4)),
    *_vision("tost_small", "image classifier, 22.6M parameters", (384, 12, 8)),
    *_vision("tost_medium", "image classifier, 71.5M parameters", (512, 24, 8)),
    *_vision("tost_tiny_plus", "tost_tiny with extensions, 6.2M parameters", (192, 12, 4), **_PLUS),
    *_vision("tost_small_plus", "tost_small with extensions, 24.4M parameters", (384, 12, 8), **_PLUS),
    *_vision("tost_medium_plus", "tost_medium with extensions, 77.9M parameters", (512, 24, 8), **_PLUS),
    *_vision("tost_tiny_24", "image classifier, 24 layers, 10.2M parameters", (192, 24, 4)),
    *_vision("tost_small_24", "image classifier, 24 layers, 40.3M parameters", (384, 24, 8)),
    *_vision("tost_large", "image classifier, 24 layers, 160M parameters", (768, 24, 16)),
    _vision("xcit_small_nolpi", "XCiT without local interaction, 26.1M parameters", (384, 12, 8), mixer="xca")[0],
    _vision("xcit_medium_nolpi", "XCiT without local interaction, 84.1M parameters", (512, 24, 8), mixer="xca")[0],
    _image("crate_tiny_patch16_224", CrateOptions, "white-box image classifier, 6.1M parameters", (384, 12, 6)),
    _image("crate_small_patch16_224", CrateOptions, "white-box image classifier, 13.1M parameters", (576, 12, 12)),
    _image("crate_base_patch16_224", CrateOptions, "white-box image classifier, 22.8M parameters", (768, 12, 12)),
    _image("crate_large_patch16_224", CrateOptions, "white-box image classifier, 77.6M parameters", (1024, 24, 16)),
    _image("vit_small_patch16_224", VitOptions, "timm's vision transformer, 22.1M parameters", (384, 12, 6)),
    _image("vit_base_patch16_224", VitOptions, "timm's vision transformer, 86.6M parameters", (768, 12, 12)),
    # Small images on a CPU: 0.38M parameters each, within 2 % of each other, for 10 classes of 32 x 32 pixels.
    _image("tost_mini", VisionOptions, "ToST for images of 28 to 64 pixels, 0.38M parameters", (64, 6, 4), **_MINI),
    _image("tost_mini_plus", VisionOptions, "tost_mini with extensions", (64, 6, 4), mlp_ratio=3.5, **_PLUS, **_MINI),
    _image("softmax_mini", VisionOptions, "tost_mini with softmax attention", (64, 5, 4), mixer="softmax", **_MINI),
    _image("xcit_mini", VisionOptions, "tost_mini with cross-covariance attention", (64, 5, 4), mixer="xca", **_MINI),
    _image(
        "vit_mini",
        VitOptions,
        "plain ViT as large as tost_mini, without its convolutions",
        (64, 7, 4),
        mlp_ratio=4.25,
        image_size=32,
        **_MINI,
    ),
    _image("crate_mini", CrateOptions, "CRATE as large as tost_mini", (140, 6, 4), image_size=32, **_MINI),
)


# What each kind of language model changes. The last is not in the paper; without learned positions it takes texts of
# any length.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tost_lm_{}": ("causal language model", {}),
    "gpt2_{}": ("GPT-2: softmax attention in the same blocks", {"mixer": "softmax", "layer_scale": None}),
    "tost_lm_{}_plus": (
        "tost_lm with statistics in blocks over gated windows, and convolutions",
        {
            **{"mixer": "tssa_plus", "conv_width": 4, "conv_at": "both", "conv_start": "previous"},
            **{"layer_scale": None, "position": "none"},
        },
    ),
}


def _language(size: str, embed_dim: int, depth: int, num_heads: int, *parameters: str) -> list[ModelSpec]:
    """Describe the language models of one size; `parameters` are their counts, in the order of the kinds."""
    sizes = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
    return [
        ModelSpec(
            name=name.format(size),
            build="tost.models.language:LanguageToST",
            options=LanguageOptions,
            tasks=("language_modeling",),
            defaults=sizes | more,
            description=f"{what}, {count} parameters",
        )
        for (name, (what, more)), count in zip(_KINDS.items(), parameters, strict=True)
    ]


LANGUAGE_MODELS = (
    *_language("base", 768, 12, 12, "110M", "124M", "117M"),
    *_language("medium", 1024, 24, 16, "304M", "354M", "332M"),
    *_language("large", 1280, 36, 20, "655M", "772M", "721M"),
)


_TASKS = {
    "listops": "value of a nested list expression",
    "text": "sentiment of a film review, byte by byte",
    "retrieval": "whether one of two papers cites the other, byte by byte",
    "image": "grey CIFAR-10 images, pixel by pixel",
    "pathfinder": "whether two dots lie on the same dashed curve, 32 x 32 pixels",
    "pathx": "the same on 128 x 128 pixels",
}


def _tokens(vocab_size: int, max_length: int, num_classes: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "max_length": max_length, "num_classes": num_classes}
    return {"input": "tokens", **sizes, **more}


def _values(max_length: int, num_classes: int, **more: Any) -> dict[str, Any]:
    return {"input": "values", "in_features": 1, "max_length": max_length, "num_classes": num_classes, **more}


def _blocks(
    depth: int, embed_dim: int, num_heads: int, mlp_ratio: float, dropout: float, **more: Any
) -> dict[str, Any]:
    sizes = {"depth": depth, "embed_dim": embed_dim, "num_heads": num_heads, "mlp_ratio": mlp_ratio}
    return {**sizes, "dropout": dropout, **more}


_PATHS = _blocks(2, 64, 2, 2.0, 0.1, position="learned", head_kind="mlp_relu")
_PAPER: dict[str, Mapping[str, Any]] = {
    "listops": _tokens(16, 2000, 10) | _blocks(6, 512, 8, 4.0, 0.1),  # 15 symbols and padding
    "text": _tokens(258, 4001, 2) | _blocks(4, 256, 4, 4.0, 0.1),  # bytes, padding, end
    "retrieval": _tokens(258, 4001, 2, towers=2, pair="concat") | _blocks(6, 128, 4, 4.0, 0.1),
    "image": _values(1024, 10) | _blocks(8, 64, 8, 2.0, 0.0),
    "pathfinder": _tokens(256, 1024, 2) | _PATHS,
    "pathx": _tokens(256, 16_384, 2) | _PATHS,
}


def _sequence(name: str, description: str, defaults: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(
        name=name,
        build="tost.models.sequence:SequenceClassifier",
        options=SequenceClassifierOptions,
        tasks=("classification",),
        defaults=defaults,
        description=description,
    )


SEQUENCE_MODELS = (
    _sequence("tost_sequence", "small classifier of numbers", _values(1024, 10) | _blocks(4, 64, 8, 2.0, 0.0)),
    *(_sequence(f"lra_{task}", f"Long-Range Arena: {_TASKS[task]}", options) for task, options in _PAPER.items()),
)
