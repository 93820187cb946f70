"""A piece of a sequence, walked through in chunks: no temporary is as long as the piece."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tost.ops._numerics import statistics_dtype, zero_padding

# Numbers in a chunk on a CPU: a handful of temporaries of this size stay in its cache.
_CHUNK_NUMEL = 1 << 16


def chunks(w: Tensor) -> list[slice]:
    """Return consecutive ranges that cover the tokens of w [B, N, H, D]; at least one, so that sums have a shape."""
    if w.device.type != "cpu":
        return [slice(0, w.shape[1])]
    length = max(1, _CHUNK_NUMEL // max(1, w.shape[0] * w.shape[2] * w.shape[3]))
    return [slice(start, start + length) for start in range(0, max(1, w.shape[1]), length)]


def tokens_of(x: Tensor, mask: Tensor | None, rows: slice) -> Tensor:
    """Return the tokens `rows` of x [B, N, H, D] in the dtype of the statistics, 0 where there is padding."""
    return zero_padding(x[:, rows].to(statistics_dtype(x.dtype)), None if mask is None else mask[:, rows])


def accumulate(parts: Iterable[Tensor]) -> Tensor:
    """Add the sums of the chunks in order and in float64, and return their total in their dtype."""
    total: Tensor | None = None
    for part in parts:
        total = part.double() if total is None else total.add_(part)
    assert total is not None
    return total.to(part.dtype)
