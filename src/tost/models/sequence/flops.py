"""How much arithmetic the token mixers of the long-range models do, from their options alone. Loads no torch."""

from __future__ import annotations

import math
from typing import Any

from tost.models.options import SequenceClassifierOptions

__all__ = ["mixer_products"]


def mixer_products(options: SequenceClassifierOptions) -> int:
    """Count the multiply-adds of a mixer per token, projections included.

    Mixers whose work per token depends on the length are counted for sequences of `max_length` tokens. The Fourier
    transforms and kernels of S4 are left out.

    Args:
        options: Options of a long-range model.

    Returns:
        Multiply-adds of one mixer.
    """
    C, N = options.embed_dim, options.max_length
    own: Any = options.all_mixer_options()
    if options.mixer == "tssa":
        return (3 if own.gate else 2) * C * C
    if options.mixer in ("s4", "s4d"):
        return 2 * C * C
    if options.mixer == "reformer":
        return _reformer(C, N, own)
    return 4 * C * C + _between(options, own)


def _between(options: SequenceClassifierOptions, own: Any) -> int:
    """Count what a mixer with queries, keys, values and outputs does between its projections."""
    C, H, N = options.embed_dim, options.num_heads, options.max_length
    count: int
    if options.mixer == "linear" or (options.mixer == "performer" and own.kernel == "relu"):
        count = C + 2 * C * C // H
    elif options.mixer == "performer":
        count = (own.num_features or max(1, int(C // H * math.log(C // H)))) * (4 * C + H)
    elif options.mixer == "linformer":
        count = 4 * own.rank * C
    elif options.mixer == "bigbird":
        count = 2 * own.block_size * (7 + own.num_random) * C  # five blocks, the random ones, and two that see all
    elif options.mixer == "nystrom" and own.num_landmarks < N:
        M = own.num_landmarks
        inverse = 4 * own.iterations * H * M**3 + 2 * M * M * C
        count = (4 * M + own.conv_width) * C + inverse // N
    else:
        count = 2 * N * C + (own.conv_width * C if options.mixer == "nystrom" else 0)
    return count


def _reformer(C: int, N: int, own: Any) -> int:
    """Count the products of LSH attention: fewer projections, hashes, and two chunks that every token sees."""
    if own.form == "lra":
        projections, chunk, buckets = 2 * C * C, N // 10 + 1, 10
    else:
        projections, chunk, buckets = 3 * C * C, own.chunk_size, max(2 * N // own.chunk_size, 2)
    per_hash: int = C * ((own.num_buckets or buckets) // 2 + 4 * chunk)
    return projections + int(own.num_hashes) * per_hash
