"""Functions on tensors: TSSA, causal TSSA, their memberships and state. No modules, no configuration."""

from __future__ import annotations

from tost.ops._dispatch import available_backends, operators
from tost.ops._native import native_info, select_isa
from tost.ops.causal_tssa import (
    causal_membership,
    causal_tssa,
    causal_tssa_,
    causal_tssa_step,
    causal_tssa_with_state,
)
from tost.ops.state import TSSAState
from tost.ops.tssa import membership, tssa, tssa_

__all__ = [
    "TSSAState",
    "available_backends",
    "causal_membership",
    "causal_tssa",
    "causal_tssa_",
    "causal_tssa_step",
    "causal_tssa_with_state",
    "membership",
    "native_info",
    "operators",
    "select_isa",
    "tssa",
    "tssa_",
]
