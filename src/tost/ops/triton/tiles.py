"""Sizes of tiles. Loads no triton: what the operators return depends on them.

A tile has about 4,096 numbers, 16 for each thread of 8 warps. With twice as many, registers spill on some devices.
"""

from __future__ import annotations

from typing import NamedTuple

TARGET_NAMES = ("sm80", "sm90", "sm100", "gfx942")
"""Devices that the tests compile the kernels for."""
LANES = 4096
LONGEST_CHUNK = 64
SHORT = 256
"""Sequences of up to this many tokens are one program, where they are not causal."""
WIDEST = 16384
"""The most numbers that a token may have, with H and D rounded up to powers of two."""


class Tiles(NamedTuple):
    """Sizes, all powers of two.

    Attributes:
        HP: Heads, rounded up.
        DP: Head width, rounded up.
        CHUNK: Tokens in a chunk: a tile of one head.
        T: Tokens in a tile of all heads.
        BLOCK: Chunks in a tile of the scan over chunks.
        ROWS: Tokens in a tile of memberships.
    """

    HP: int
    DP: int
    CHUNK: int
    T: int
    BLOCK: int
    ROWS: int


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def choose_tiles(H: int, D: int) -> Tiles:
    """Return the sizes for H heads of width D."""
    HP, DP = _power_of_two(H), max(16, _power_of_two(D))
    chunk = min(LONGEST_CHUNK, max(1, LANES // DP))
    return Tiles(HP, DP, chunk, min(chunk, max(1, LANES // (HP * DP))), chunk, max(1, LANES // HP))


def num_chunks(length: int, chunk: int) -> int:
    """Return how many chunks a sequence has."""
    return -(-length // chunk)
