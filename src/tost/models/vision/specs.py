"""The registered image models. Loads no torch."""

from __future__ import annotations

from typing import Any

from tost.models.spec import ModelSpec
from tost.models.vision.options import CrateOptions, ImageOptions, VisionOptions, VitOptions

_CLASSES: dict[type[ImageOptions], str] = {
    VisionOptions: "tost.models.vision.model:VisionToST",
    CrateOptions: "tost.models.vision.crate:CRATE",
    VitOptions: "tost.models.vision.vit:ViT",
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
_PLUS = {
    **{"conv_width": 3, "conv_at": "block"},
    **{"block_size": 8, "gate": True, "head_norm": True, "unit_variance": True},
}
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
    _image("deit_small_patch16_224", VitOptions, "the same network as vit_small, under DeiT's name", (384, 12, 6)),
    _image("deit_base_patch16_224", VitOptions, "the same network as vit_base, under DeiT's name", (768, 12, 12)),
    # Small images on a CPU: 0.38M parameters each, within 2 % of each other, for 10 classes of 32 x 32 pixels.
    _image("tost_mini", VisionOptions, "ToST for images of 28 to 64 pixels, 0.38M parameters", (64, 6, 4), **_MINI),
    _image(
        "tost_mini_plus",
        VisionOptions,
        "tost_mini with extensions",
        (64, 6, 4),
        mlp_ratio=3.5,
        **_PLUS,
        **_MINI,
    ),
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
