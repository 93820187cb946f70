"""BigBird: block-sparse softmax attention with global, neighbouring and random blocks.

Written here because the class in transformers attends fully to short sequences, drops its random blocks in evaluation,
takes lengths that are multiples of the block only, and cannot be had without its configuration.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, H, N, D] with C = H * D, blocks [B, H, T, S, D] with T blocks of S
tokens, draws [H, 256, R], mask [B, N].
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from tost.nn.mixers.base import ProjectedMixer, Projections, real_first

ROWS = 256
"""Blocks for which random numbers are kept; longer sequences use them again."""
NOWHERE = 2**40
"""Number of a block that does not exist, larger than all others."""


def bigbird_pattern(draws: Tensor, num_blocks: int, *, random_blocks: int | None = None) -> Tensor:
    """Return which blocks attend to which.

    The first and the last block attend to all and all attend to them. Every other block attends to itself, to both of
    its neighbours, and to R more blocks, which are drawn without repetition from those that are left; fewer if fewer
    are left.

    Args:
        draws: Random numbers of a module, ``BigBird.draws``: int64 ``[H, 256, R]``.
        num_blocks: Blocks of the sequence, T.
        random_blocks: Draw from the first so many blocks only; None for all.

    Returns:
        bool ``[H, T, T]``, queries before keys.

    Example:
        >>> import torch
        >>> from tost.nn.mixers import bigbird_pattern
        >>> bigbird_pattern(torch.zeros(1, 256, 1, dtype=torch.int64), 7)[0, 3].tolist()
        [True, True, True, True, True, False, True]
    """
    at = torch.arange(num_blocks, device=draws.device)
    near = (at[:, None] - at).abs() <= 1
    ends = (at == 0) | (at == num_blocks - 1)
    count = torch.tensor([num_blocks], device=draws.device)
    chosen = _random_blocks(draws, num_blocks, count, random_blocks)[0]
    drawn = (chosen[..., None] == at).any(dim=-2)
    return near | ends | ends[:, None] | drawn


def _random_blocks(draws: Tensor, num_blocks: int, count: Tensor, limit: int | None) -> Tensor:
    """Return the random blocks of every block, [B, H, T, R], for sequences of count [B] blocks; `NOWHERE` for none."""
    at = torch.arange(num_blocks, device=draws.device)
    last = count[:, None] - 1
    near = torch.stack((torch.zeros_like(at), at - 1, at, at + 1), dim=-1).expand(count.shape[0], -1, -1)
    fixed = torch.cat((near, last.unsqueeze(-1).expand(-1, num_blocks, 1)), dim=-1)
    taken = _distinct(fixed.masked_fill((fixed < 0) | (fixed > last.unsqueeze(-1)), NOWHERE)).unsqueeze(1)
    taken = taken.expand(-1, draws.shape[0], -1, -1)
    allowed = (count if limit is None else count.clamp_max(limit))[:, None, None]
    chosen: list[Tensor] = []
    for numbers in draws[:, at % ROWS].unbind(dim=-1):
        left = allowed - (taken < allowed[..., None]).sum(dim=-1)
        block = numbers % left.clamp_min(1)
        for before in taken.unbind(dim=-1):  # in ascending order: skip what is taken
            block = block + (block >= before)
        chosen.append(block.masked_fill(left <= 0, NOWHERE))
        taken = torch.cat((taken, chosen[-1].unsqueeze(-1)), dim=-1).sort(dim=-1).values
    return torch.stack(chosen, dim=-1) if chosen else taken[..., :0]


def _distinct(numbers: Tensor) -> Tensor:
    """Sort numbers [..., K] and replace repetitions by `NOWHERE`."""
    ordered = numbers.sort(dim=-1).values
    again = F.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    return ordered.masked_fill(again, NOWHERE).sort(dim=-1).values


class BigBird(ProjectedMixer):
    """Attention of BigBird (Zaheer et al., 2020): softmax attention between the blocks of `bigbird_pattern`.

    Every block but the first and the last sees at most ``5 + num_random`` blocks, so the cost is linear in the number
    of tokens. The random blocks follow from a buffer of random numbers, which torch draws when the module is made and
    which is saved with the weights; they are the same in training and in evaluation. The official Long-Range Arena
    draws them from the first 1024 tokens (``random_length=1024``).

    Blocks are cut from the real tokens and counted in each sequence, so a mask is a deletion.

    Arguments are those of `ProjectedMixer`, plus:

    Args:
        block_size: Tokens per block, S.
        num_random: Random blocks per block, R.
        random_length: Draw them from the first so many tokens only, rounded up to blocks; None for all.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or another argument is out of its range.

    Example:
        >>> import torch, tost
        >>> tost.nn.BigBird(64, 4, block_size=16)(torch.randn(2, 1000, 64)).shape
        torch.Size([2, 1000, 64])
    """

    draws: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        block_size: int = 64,
        num_random: int = 3,
        random_length: int | None = None,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(embed_dim, num_heads, **projections)
        if block_size < 1 or num_random < 0 or (random_length or 1) < 1:
            raise ValueError(
                f"block_size={block_size}, num_random={num_random} and random_length={random_length} are not possible "
                "together; use at least 1, 0 and 1."
            )
        self.block_size, self.num_random, self.random_length = block_size, num_random, random_length
        draws = torch.randint(2**31, (num_heads, ROWS, num_random), device=self.proj_in.weight.device)
        self.register_buffer("draws", draws)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{super().extra_repr()}, block_size={self.block_size}, num_random={self.num_random}"

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        return real_first(self._sparse, parts, mask) if parts.shape[1] > 0 else parts[:, :, 0]

    def _sparse(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        B, N, S = parts.shape[0], parts.shape[1], self.block_size
        T = -(-N // S)
        if mask is None and N < T * S:
            mask = parts.new_ones((1, N), dtype=torch.bool)
        if mask is not None:
            mask = F.pad(mask | ~mask.any(dim=1, keepdim=True), (0, T * S - N)).reshape(-1, T, S)
        parts = F.pad(parts, (0, 0, 0, 0, 0, 0, 0, T * S - N))
        # [B, H, T, S, D] each
        query, key, value = torch.unflatten(parts, 1, (T, S)).permute(3, 0, 4, 1, 2, 5).unbind(0)
        count = mask.any(dim=2).sum(dim=1) if mask is not None else torch.tensor([T], device=parts.device)
        mixed = self._blocks(query, key, value, mask, count)
        ends = self._ends(query, key, value, mask, count)
        at = torch.arange(T, device=parts.device)[:, None, None]
        for block, place in zip(ends, (torch.zeros_like(count), count - 1), strict=True):
            mixed = block.where(at == place[:, None, None, None, None], mixed)
        return mixed.permute(0, 2, 3, 1, 4).reshape(B, T * S, self.num_heads, -1)[:, :N]

    def _ends(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what the first and the last block of each sequence see: everything. [B, H, 1, S, D] each."""
        ends = torch.cat((query[:, :, 0], _pick(query, count - 1)), dim=2)
        real = None if mask is None else mask.flatten(1)[:, None, None, :]
        mixed = self._softmax(ends, key.flatten(2, 3), value.flatten(2, 3), real).unsqueeze(2)
        return mixed[..., : self.block_size, :], mixed[..., self.block_size :, :]

    def _blocks(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        """Return what every block sees of its own part of the sequence, [B, H, T, S, D]."""
        B, H, T, S, _ = query.shape
        limit = None if self.random_length is None else -(-self.random_length // S)
        chosen = _random_blocks(self.draws, T, count, limit).expand(B, -1, -1, -1)
        index = chosen.where(chosen < T, 0)
        at, last = torch.arange(T, device=query.device), count[:, None] - 1
        # No block may count twice: neighbours and ends are the same at both ends of the sequence.
        seen = [x.expand(B, T) for x in (at > 1, at > 0, at >= 0, at < last, at + 1 < last)]
        fixed = torch.stack(seen, dim=-1)[:, None].expand(-1, H, -1, -1)
        seen_blocks = torch.cat((fixed, chosen < T), dim=-1).unsqueeze(-1).expand(-1, -1, -1, -1, S)
        if mask is not None:
            reals = mask.expand(B, -1, -1)[:, None, :, :, None].expand(-1, H, -1, -1, 1)
            seen_blocks = seen_blocks & self._gather(reals, count, index).reshape(seen_blocks.shape)
        keys, values = self._gather(key, count, index), self._gather(value, count, index)
        real = seen_blocks.flatten(3)[:, :, :, None, :]
        mixed = self._softmax(*(x.flatten(1, 2) for x in (query, keys, values, real)))
        return mixed.reshape(query.shape)

    def _gather(self, x: Tensor, count: Tensor, index: Tensor) -> Tensor:
        """Return the blocks of x [B, H, T, S, E] that each block may see: [B, H, T, (5 + R) * S, E]."""
        B, H, T, S, E = x.shape
        first, last = x[:, :, :1].expand_as(x), _pick(x, count - 1).unsqueeze(2).expand_as(x)
        fixed = (first, x.roll(1, dims=2), x, x.roll(-1, dims=2), last)
        # Whole blocks are rows of a table, which index_select copies and whose gradient it adds up fast.
        offset = torch.arange(B * H, device=x.device).reshape(B, H, 1, 1) * T
        drawn = x.reshape(B * H * T, S * E).index_select(0, (offset + index).flatten())
        return torch.cat((*fixed, drawn.reshape(B, H, T, self.num_random * S, E)), dim=3)


def _pick(x: Tensor, block: Tensor) -> Tensor:
    """Return one block of each sequence of x [B, H, T, S, E]: [B, H, S, E]; block is [B], or [1] for all."""
    if block.shape[0] == 1:
        return x.index_select(2, block).squeeze(2)
    index = block[:, None, None, None, None].expand(-1, x.shape[1], 1, *x.shape[3:])
    return x.gather(2, index).squeeze(2)
