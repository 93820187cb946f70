"""The operators over a process group that shares one sequence: what crosses between ranks is a few fixed-size sums."""

from __future__ import annotations

from tost.parallel.context import ContextParallel, SharedPacking, active, make_mesh

__all__ = ["ContextParallel", "SharedPacking", "active", "make_mesh"]
