"""The models: a registry of names, their options, and the networks. Importing this package loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tost.models._registry import ModelSpec, create_model, list_models, model_options, model_spec
    from tost.models.flops import TokenFlops, token_flops
    from tost.models.language import LanguageToST
    from tost.models.longrange import SequenceClassifier
    from tost.models.options import LanguageOptions, SequenceClassifierOptions

__all__ = [
    "LanguageOptions",
    "LanguageToST",
    "ModelSpec",
    "SequenceClassifier",
    "SequenceClassifierOptions",
    "TokenFlops",
    "create_model",
    "list_models",
    "model_options",
    "model_spec",
    "token_flops",
]

_HOME = {
    "LanguageOptions": "options",
    "LanguageToST": "language",
    "ModelSpec": "_registry",
    "SequenceClassifier": "longrange",
    "SequenceClassifierOptions": "options",
    "TokenFlops": "flops",
    "create_model": "_registry",
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
