"""The models: a registry of names, their options, and the networks. Importing this package loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tost._lazy import lazy

if TYPE_CHECKING:
    from tost.models._registry import ModelSpec, create_model, list_models, model_options, model_spec
    from tost.models.baselines_vit import ViT
    from tost.models.crate import CRATE
    from tost.models.flops import TokenFlops, image_flops, token_flops
    from tost.models.language import LanguageToST
    from tost.models.longrange import SequenceClassifier
    from tost.models.options import LanguageOptions, SequenceClassifierOptions
    from tost.models.vision import VisionToST
    from tost.models.vision_options import CrateOptions, VisionOptions, VitOptions

__all__ = [
    "CRATE",
    "CrateOptions",
    "LanguageOptions",
    "LanguageToST",
    "ModelSpec",
    "SequenceClassifier",
    "SequenceClassifierOptions",
    "TokenFlops",
    "ViT",
    "VisionOptions",
    "VisionToST",
    "VitOptions",
    "create_model",
    "image_flops",
    "list_models",
    "model_options",
    "model_spec",
    "token_flops",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "_registry": ("ModelSpec", "create_model", "list_models", "model_options", "model_spec"),
        "baselines_vit": ("ViT",),
        "crate": ("CRATE",),
        "flops": ("TokenFlops", "image_flops", "token_flops"),
        "language": ("LanguageToST",),
        "longrange": ("SequenceClassifier",),
        "options": ("LanguageOptions", "SequenceClassifierOptions"),
        "vision": ("VisionToST",),
        "vision_options": ("CrateOptions", "VisionOptions", "VitOptions"),
    },
)
