"""Look inside: what the layers of a model do, as numbers and as pictures.

Importing this package loads no torch: the names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tost._lazy import lazy

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "_registry": ("ALL", "ANALYSES", "Analysis", "find_analysis"),
        "class_attention": ("ClassAttentionMaps", "class_attention_maps"),
        "foreground": ("foreground_by_border",),
        "gains": ("Gains", "gains_by_layer"),
        "heads": ("Flattening", "HeadUsage", "head_usage", "membership_flattening"),
        "memberships": ("MembershipMaps", "TextMemberships", "membership_maps", "text_memberships"),
        "memory": ("StateMemory", "state_memory"),
        "rates": ("CodingRates", "RateCurve", "coding_rate_by_layer", "rates_of_tokens"),
        "records": ("AttentionLayer", "LayerRecord", "attention_layers", "capture", "membership_of", "observe"),
        "result": ("Result", "image_bytes", "save"),
        "subspaces": ("SubspaceCoherence", "subspace_coherence"),
        "suite": ("Samples", "analyse", "applicable", "control_of", "require", "why_not"),
    },
)
