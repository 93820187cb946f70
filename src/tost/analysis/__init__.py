"""Look inside: what the layers of a model do, as numbers and as pictures.

Importing this package loads no torch: the names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tost.analysis._registry import ALL, ANALYSES, Analysis, find_analysis
    from tost.analysis.class_attention import ClassAttentionMaps, class_attention_maps
    from tost.analysis.foreground import foreground_by_border
    from tost.analysis.gains import Gains, gains_by_layer
    from tost.analysis.heads import Flattening, HeadUsage, head_usage, membership_flattening
    from tost.analysis.memberships import MembershipMaps, TextMemberships, membership_maps, text_memberships
    from tost.analysis.memory import StateMemory, state_memory
    from tost.analysis.rates import CodingRates, RateCurve, coding_rate_by_layer, rates_of_tokens
    from tost.analysis.records import AttentionLayer, LayerRecord, attention_layers, capture, membership_of, observe
    from tost.analysis.result import Result, image_bytes, save
    from tost.analysis.subspaces import SubspaceCoherence, subspace_coherence
    from tost.analysis.suite import Samples, analyse, applicable, control_of, require, why_not

_HOME = {
    "ALL": "_registry",
    "ANALYSES": "_registry",
    "Analysis": "_registry",
    "AttentionLayer": "records",
    "ClassAttentionMaps": "class_attention",
    "CodingRates": "rates",
    "Flattening": "heads",
    "Gains": "gains",
    "HeadUsage": "heads",
    "LayerRecord": "records",
    "MembershipMaps": "memberships",
    "RateCurve": "rates",
    "Result": "result",
    "Samples": "suite",
    "StateMemory": "memory",
    "SubspaceCoherence": "subspaces",
    "TextMemberships": "memberships",
    "analyse": "suite",
    "applicable": "suite",
    "attention_layers": "records",
    "capture": "records",
    "class_attention_maps": "class_attention",
    "coding_rate_by_layer": "rates",
    "control_of": "suite",
    "find_analysis": "_registry",
    "foreground_by_border": "foreground",
    "gains_by_layer": "gains",
    "head_usage": "heads",
    "image_bytes": "result",
    "membership_flattening": "heads",
    "membership_maps": "memberships",
    "membership_of": "records",
    "observe": "records",
    "rates_of_tokens": "rates",
    "require": "suite",
    "save": "result",
    "state_memory": "memory",
    "subspace_coherence": "subspaces",
    "text_memberships": "memberships",
    "why_not": "suite",
}
__all__ = [
    "ALL",
    "ANALYSES",
    "Analysis",
    "AttentionLayer",
    "ClassAttentionMaps",
    "CodingRates",
    "Flattening",
    "Gains",
    "HeadUsage",
    "LayerRecord",
    "MembershipMaps",
    "RateCurve",
    "Result",
    "Samples",
    "StateMemory",
    "SubspaceCoherence",
    "TextMemberships",
    "analyse",
    "applicable",
    "attention_layers",
    "capture",
    "class_attention_maps",
    "coding_rate_by_layer",
    "control_of",
    "find_analysis",
    "foreground_by_border",
    "gains_by_layer",
    "head_usage",
    "image_bytes",
    "membership_flattening",
    "membership_maps",
    "membership_of",
    "observe",
    "rates_of_tokens",
    "require",
    "save",
    "state_memory",
    "subspace_coherence",
    "text_memberships",
    "why_not",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tost.analysis' has no attribute {name!r}")
    value = getattr(import_module(f"tost.analysis.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
