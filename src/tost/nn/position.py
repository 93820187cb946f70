"""Positions of tokens in their sequences, and vectors for them.

Shapes: positions [B, N] or [1, N] where all sequences are alike, int64; vectors [B, N, C] or [1, N, C].
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn._checks import Factory
from tost.ops import Packing
from tost.ops._transforms import is_transformed
from tost.ops.packing import count_tokens
from tost.parallel import active


def token_positions(
    num_tokens: int,
    *,
    mask: Tensor | None = None,
    start: Tensor | None = None,
    max_length: int | None = None,
    device: torch.device | str | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Number the real tokens of each sequence, so that padding on either side moves none of them.

    Inside ``with ContextParallel():`` the tokens are a piece of a longer sequence and are numbered within the whole.

    Args:
        num_tokens: N, padding included.
        mask: Real tokens, bool ``[B, N]``.
        start: Tokens that came before, int64 ``[B]``; None at the start of a sequence. ``[S]`` for packed sequences.
        max_length: Number of positions that exist; None for no limit.
        device: Where the tokens are, and `mask` and `start` with them.
        packing: Where the sequences begin, if several are packed into a row.

    Returns:
        int64 ``[B, N]``, or ``[1, N]`` if all rows are alike. Padding gets 0.

    Raises:
        ValueError: A real token is beyond `max_length`. With `mask` or `start` this has to look at the data,
            which is done on a CPU only, and not while compiling.

    Example:
        >>> import torch
        >>> from tost.nn import token_positions
        >>> token_positions(4, mask=torch.tensor([[False, True, True, True]])).tolist()
        [[0, 0, 1, 2]]
    """
    if max_length is not None:
        needed = _needed(num_tokens, mask, start, device, packing)
        if needed > max_length:
            raise ValueError(
                f"the sequence reaches position {needed}, but this model has {max_length} positions. "
                f"Use a shorter sequence, or build the model with max_length={needed} or more."
            )
    if (context := active()) is not None:
        before = context.offset(count_tokens(num_tokens, mask, packing, device))
        start = before if start is None else start + before
    if packing is not None:
        return packing.positions(mask, start)
    positions = torch.arange(num_tokens, device=device).unsqueeze(0) if mask is None else mask.cumsum(dim=1) - 1
    if start is not None:
        positions = positions + start.unsqueeze(1)
    return positions if mask is None else positions.where(mask, 0)


def _needed(
    num_tokens: int,
    mask: Tensor | None,
    start: Tensor | None,
    device: torch.device | str | None,
    packing: Packing | None,
) -> int:
    """Return the number of positions that the longest sequence takes; 0 if that cannot be seen from here."""
    context = active()
    if mask is None and start is None and context is None and packing is None:
        return num_tokens
    # The count is data: looking at it would break a graph, or wait for the device.
    if torch.compiler.is_compiling() or is_transformed() or torch.device(device or "cpu").type != "cpu":
        return 0
    tokens = count_tokens(num_tokens, mask, packing, device)
    if context is not None:  # every rank has to come to the same conclusion
        tokens = context.sum(tokens)
    tokens = tokens if start is None else tokens + start
    return int(tokens.max()) if tokens.numel() else 0


class LearnedPositions(nn.Module):
    """One learned vector per position, initially N(0, 0.02).

    Args:
        max_length: Number of positions.
        embed_dim: Width of the vectors, C.
        **factory: `device` and `dtype` of the parameters.
    """

    def __init__(self, max_length: int, embed_dim: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_length, embed_dim, **factory))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """Look up the vectors of positions [B, N]; returns [B, N, C]."""
        return F.embedding(positions, self.weight)


class SinusoidalPositions(nn.Module):
    """Fixed waves: sines in the first half of the width, cosines in the second, wavelengths from 2 pi to 20,000 pi.

    This is the arrangement of tensor2tensor and fairseq, which the long-range models of the paper are built on. There
    is nothing to store: the waves are computed when they are needed, so a model made on the meta device misses nothing.

    Args:
        max_length: Number of positions; None for no limit.
        embed_dim: Width of the vectors, C; even and at least 4.

    Raises:
        ValueError: `embed_dim` cannot be split into sines and cosines.
    """

    def __init__(self, max_length: int | None, embed_dim: int) -> None:
        super().__init__()
        if embed_dim < 4 or embed_dim % 2:
            raise ValueError(f"embed_dim={embed_dim} cannot hold sines and cosines; use an even number of at least 4.")
        self.max_length, self.embed_dim = max_length, embed_dim

    def forward(self, positions: Tensor) -> Tensor:
        """Return the waves at positions [B, N], float32 [B, N, C]."""
        # A compiled graph that compares lengths would be made for each side of the comparison.
        row = positions.shape[0] == 1 and (
            torch.compiler.is_compiling() or positions.shape[1] <= (self.max_length or 0)
        )
        if self.max_length is None or row:
            return self._waves(positions)
        # Sequences of a batch repeat the same few positions: look them up instead of taking as many sines as tokens.
        return F.embedding(positions, self._waves(torch.arange(self.max_length, device=positions.device)))

    def _waves(self, positions: Tensor) -> Tensor:
        half = self.embed_dim // 2
        rates = torch.exp(torch.arange(half, device=positions.device) * (-math.log(10_000.0) / (half - 1)))
        angles = positions.unsqueeze(-1).float() * rates.float()
        return torch.cat((angles.sin(), angles.cos()), dim=-1)
