"""The models: a registry of names, their options, and the networks. Importing this package loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOME = {
    "CRATE": "crate",
    "CrateOptions": "vision_options",
    "LanguageOptions": "options",
    "LanguageToST": "language",
    "ModelSpec": "_registry",
    "SequenceClassifier": "longrange",
    "SequenceClassifierOptions": "options",
    "TokenFlops": "flops",
    "ViT": "baselines_vit",
    "VisionOptions": "vision_options",
    "VisionToST": "vision",
    "VitOptions": "vision_options",
    "create_model": "_registry",
    "image_flops": "flops",
    "list_models": "_registry",
    "model_options": "_registry",
    "model_spec": "_registry",
    "token_flops": "flops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tost.models' has no attribute {name!r}")
    value = getattr(import_module(f"tost.models.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
