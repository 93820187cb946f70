"""tost: attention from token statistics, in linear time, with a constant-size state.

Public names are loaded on first use, so that ``import tost`` and the command line's help stay instant.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("tost")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

if TYPE_CHECKING:
    from tost import analysis, models, nn, objective, ops
    from tost.generate import generate
    from tost.integrations.official import load_official
    from tost.models import create_model, list_models
    from tost.nn import CausalTSSAttention, TSSAttention
    from tost.ops import TSSAState, available_backends
    from tost.ops.causal_tssa import causal_membership, causal_tssa, causal_tssa_step, causal_tssa_with_state
    from tost.ops.tssa import membership, tssa
    from tost.train.saved import load_model

__all__ = [
    "CausalTSSAttention",
    "TSSAState",
    "TSSAttention",
    "analysis",
    "available_backends",
    "causal_membership",
    "causal_tssa",
    "causal_tssa_step",
    "causal_tssa_with_state",
    "create_model",
    "generate",
    "list_models",
    "load_model",
    "load_official",
    "membership",
    "models",
    "nn",
    "objective",
    "ops",
    "tssa",
]

_HOME = {
    "CausalTSSAttention": "tost.nn",
    "TSSAState": "tost.ops",
    "TSSAttention": "tost.nn",
    "available_backends": "tost.ops",
    "causal_membership": "tost.ops",
    "causal_tssa": "tost.ops",
    "causal_tssa_step": "tost.ops",
    "causal_tssa_with_state": "tost.ops",
    "create_model": "tost.models",
    "list_models": "tost.models",
    "load_model": "tost.train.saved",
    "load_official": "tost.integrations.official",
    "membership": "tost.ops",
    "tssa": "tost.ops",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in __all__:
        value = import_module(f"tost.{name}")
    else:
        raise AttributeError(f"module 'tost' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
