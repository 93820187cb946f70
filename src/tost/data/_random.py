"""Random numbers by counting: a number depends on its keys only, not on earlier draws.

The mixer is the finalizer of SplitMix64, which spreads a change of any input bit over all 64 output bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*words: int) -> int:
    """Return 64 pseudo-random bits that depend on every word and on their order.

    Args:
        *words: Integers of any sign, taken modulo 2^64.
    """
    state = 0
    for word in words:
        state = (state ^ (word & _MASK)) + _STEP & _MASK
        state = (state ^ state >> 30) * _FIRST & _MASK
        state = (state ^ state >> 27) * _SECOND & _MASK
        state ^= state >> 31
    return state


def mix_array(prefix: int, last: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return ``mix(*words, x)`` for every x in `last`, given ``prefix = mix(*words)``."""
    state = (last ^ np.uint64(prefix)) + np.uint64(_STEP)
    state = (state ^ state >> np.uint64(30)) * np.uint64(_FIRST)
    state = (state ^ state >> np.uint64(27)) * np.uint64(_SECOND)
    return state ^ state >> np.uint64(31)
