"""The operators over a process group that shares one sequence: what crosses between ranks is a few fixed-size sums."""

from __future__ import annotations

from tost.parallel.causal import causal_tssa, causal_tssa_with_state
from tost.parallel.context import ContextParallel, SharedPacking, active, make_mesh
from tost.parallel.tssa import tssa

__all__ = ["ContextParallel", "SharedPacking", "active", "causal_tssa", "causal_tssa_with_state", "make_mesh", "tssa"]
