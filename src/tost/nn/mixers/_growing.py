"""A tensor that grows by a token at a time without being copied each time.

``torch.cat`` copies everything that is there for every token that is added. Here the longer tensor is a view into a
buffer with room to spare, which doubles when it is full: on average a token costs its own size. A
tensor that was returned keeps its values, because only what comes after it in the buffer is written, and only once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops._transforms import is_transformed

_NAME = "_tost_room"


class _Room:
    """A buffer [B, H, capacity, D], and how much of it has been given out."""

    def __init__(self, buffer: Tensor, used: int) -> None:
        self.buffer, self.used = buffer, used


def append_tokens(before: Tensor, new: Tensor) -> Tensor:
    """Return ``torch.cat((before, new), dim=2)``.

    Args:
        before: ``[B, H, M, D]``; not changed.
        new: ``[B, H, N, D]``.

    Returns:
        ``[B, H, M + N, D]`` in the dtype of `new`.
    """
    recorded = torch.is_grad_enabled() and (before.requires_grad or new.requires_grad)
    if recorded or torch.compiler.is_compiling() or is_transformed():
        return torch.cat((before.to(new.dtype), new), dim=2)
    M, total = before.shape[2], before.shape[2] + new.shape[2]
    room: _Room | None = getattr(before, _NAME, None)
    if room is None or not _has_room(room, M, total, new):
        B, H, _, D = before.shape
        room = _Room(new.new_empty(B, H, 2 * total, D), M)
        room.buffer[:, :, :M] = before
    room.buffer[:, :, M:total] = new
    room.used = total
    longer = room.buffer[:, :, :total]
    setattr(longer, _NAME, room)  # found again through the state that holds this very tensor
    return longer


def _has_room(room: _Room, length: int, total: int, new: Tensor) -> bool:
    """Return whether the space after the first `length` tokens is free; another text may continue there."""
    fits = room.used == length and total <= room.buffer.shape[2]
    # A tensor made in inference mode may not be written outside of it.
    return fits and room.buffer.dtype == new.dtype and room.buffer.is_inference() == torch.is_inference_mode_enabled()
