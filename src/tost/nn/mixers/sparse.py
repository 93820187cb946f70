"""Softmax attention to some tokens: blocks (BigBird), buckets of hashes (Reformer), learned mixtures (Linformer).

The classes of BigBird and Reformer in transformers take lengths that are multiples of a block only; the first attends
fully to short sequences and drops its random blocks in evaluation, the second draws new hashes at every call.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, H, N, D] with C = H * D, mask [B, N]. BigBird: blocks
[B, H, T, S, D] with T blocks of S tokens, draws [H, 256, R]. Reformer: buckets [B, H, R, N] with R rounds of hashing,
chunks [B, H, R, T, S, ...] with T chunks of S tokens. Linformer: mixtures [L, R] with L = max_length and R = rank.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn.mixers.base import ProjectedMixer, Projections, real_first
from tost.ops._numerics import statistics_dtype

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

    Every block but the first and the last attends to at most ``5 + num_random`` blocks, so the cost is linear in the
    tokens. The random blocks follow from a buffer of random numbers, which torch draws when the module is made and
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
        """Attend from the first and the last block of each sequence to all; returns [B, H, 1, S, D] each."""
        ends = torch.cat((query[:, :, 0], _pick(query, count - 1)), dim=2)
        real = None if mask is None else mask.flatten(1)[:, None, None, :]
        mixed = self._softmax(ends, key.flatten(2, 3), value.flatten(2, 3), real).unsqueeze(2)
        return mixed[..., : self.block_size, :], mixed[..., self.block_size :, :]

    def _blocks(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        """Attend from every block to its part of the sequence; returns [B, H, T, S, D]."""
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


MOST_BUCKETS = 1024
"""Buckets for which a module has rotations."""
LRA_BUCKETS = 10
SELF = -5e4
"""Score of a token with itself: only one without any other attends to it."""


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """Hash vectors by their direction: ``argmax over [x r, -x r]``.

    Args:
        x: ``[B, H, N, D]``.
        rotations: Random, ``[H, R, D, K / 2]`` for R rounds and K buckets; H may be 1.

    Returns:
        Buckets from 0 to K - 1, int64 ``[B, H, R, N]``.
    """
    rotated = x.unsqueeze(2) @ rotations.to(x.dtype)
    return torch.cat((rotated, -rotated), dim=-1).argmax(dim=-1)


class _Chunks(NamedTuple):
    """Sorted tokens, cut into chunks; each tensor is [B, H, R, T, S, ...]."""

    query: Tensor
    key: Tensor
    value: Tensor
    place: Tensor
    bucket: Tensor


class Reformer(ProjectedMixer):
    """LSH attention of the Reformer (Kitaev et al., 2020), not causal.

    One projection serves as query and key. Tokens are hashed, see `hash_buckets`, sorted by bucket and place, and cut
    into chunks; each attends to the tokens of its own bucket in its chunk and in the one before:

    .. code-block:: text

        k[m]    = q[m] / |q[m]|
        o[n,r]  = softmax over m of ( q[n] . k[m] ) applied to v       those m that n meets in round r; n itself only if
        z[n,r]  = logsumexp over m of ( q[n] . k[m] )                  there is no other
        y[n]    = softmax over r of z[n,r] applied to o[n,r]

    A pair that meets in several rounds counts in each, as in the implementations that are in use. With a fixed size of
    chunks the cost grows like ``N log N``. The rotations are a buffer: torch draws them when the module is made, and
    they are saved with the weights. `redraw` draws them again in each forward pass in training, as the authors do.

    ``form="lra"`` is what the official Long-Range Arena runs: 10 buckets, 10 chunks whatever the length, so that the
    cost is quadratic; one rotation for all heads; a chunk sees all of itself and of the one before, in a circle; scores
    are multiplied by ``sqrt(D)``; keys are not normalized; tokens see themselves; there is no output projection. Its
    one difference here is that padding never counts.

    Padding is sorted to the end. With `num_buckets` given a mask is a deletion. Without, it is not, since the
    number of buckets follows from the length with padding, and neither is it with ``form="lra"``, where the size of a
    chunk does.

    Arguments are those of `ProjectedMixer`, without the biases, plus:

    Args:
        num_hashes: Rounds of hashing, R.
        chunk_size: Tokens per chunk, S. Not used by ``form="lra"``.
        num_buckets: K, an even number; None takes the largest power of two up to ``2 N / S``, from 2 to 1024.
        form: ``"paper"`` or ``"lra"``.
        redraw: Take new rotations in each forward pass in training.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or another argument is out of its range.

    Example:
        >>> import torch, tost
        >>> tost.nn.Reformer(64, 4, chunk_size=16)(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    parts: ClassVar[int] = 2
    rotations: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_hashes: int = 2,
        chunk_size: int = 64,
        num_buckets: int | None = None,
        form: Literal["paper", "lra"] = "paper",
        redraw: bool = False,
        attn_drop: float = 0.0,
        out_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, form == "paper", form == "paper", attn_drop, out_drop, device, dtype)
        if form not in ("paper", "lra"):
            raise ValueError(f"form={form!r} is not known; it takes 'paper' or 'lra'.")
        if num_hashes < 1 or chunk_size < 1:
            raise ValueError(f"num_hashes={num_hashes} and chunk_size={chunk_size} must both be at least 1.")
        if num_buckets is not None and (num_buckets < 2 or num_buckets % 2 or num_buckets > MOST_BUCKETS):
            raise ValueError(f"num_buckets={num_buckets} is not an even number from 2 to {MOST_BUCKETS}.")
        self.num_hashes, self.chunk_size, self.form, self.redraw = num_hashes, chunk_size, form, redraw
        self.num_buckets = LRA_BUCKETS if form == "lra" and num_buckets is None else num_buckets
        if form == "lra":
            self.proj_out = nn.Identity()  # type: ignore[assignment]
        shape = (1 if form == "lra" else num_heads, num_hashes, self.head_dim, (self.num_buckets or MOST_BUCKETS) // 2)
        self.register_buffer("rotations", torch.randn(shape, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        sizes = f"num_hashes={self.num_hashes}, chunk_size={self.chunk_size}, num_buckets={self.num_buckets}"
        return f"{super().extra_repr()}, {sizes}, form={self.form!r}"

    @torch.no_grad()
    def redraw_rotations(self, generator: torch.Generator | None = None) -> None:
        """Take new rotations.

        Args:
            generator: Source of random numbers; torch's own if None.
        """
        self.rotations.normal_(generator=generator)

    def buckets_for(self, num_tokens: int) -> int:
        """Return the number of buckets for sequences of N tokens."""
        if self.num_buckets is not None:
            return self.num_buckets
        wanted = max(2 * num_tokens // self.chunk_size, 2)
        return min(1 << (wanted.bit_length() - 1), MOST_BUCKETS)

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        if self.training and self.redraw:
            self.redraw_rotations()
        return real_first(self._hashed, parts, mask) if parts.shape[1] > 0 else parts[:, :, 0]

    def _hashed(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        N, buckets = parts.shape[1], self.buckets_for(parts.shape[1])
        # Official: padded by one to ten tokens. Otherwise by as few as make whole chunks.
        chunks = LRA_BUCKETS if self.form == "lra" else -(-N // self.chunk_size)
        size = N // LRA_BUCKETS + 1 if self.form == "lra" else self.chunk_size
        x = F.pad(parts.to(statistics_dtype(parts.dtype)), (0, 0, 0, 0, 0, 0, 0, chunks * size - N))
        query, value = x.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D] each
        bucket = hash_buckets(query.detach(), self.rotations[..., : buckets // 2])
        real = torch.arange(chunks * size, device=x.device) < N
        if mask is not None:
            real = F.pad(mask, (0, chunks * size - N))[:, None, None, :]
        bucket = bucket.where(real, buckets)  # padding has a bucket of its own, the last
        place = torch.arange(chunks * size, device=x.device).expand_as(bucket)
        order = (bucket * (chunks * size) + place).argsort(dim=-1)
        bucket = bucket.gather(-1, order)
        key = query * math.sqrt(self.head_dim) if self.form == "lra" else F.normalize(query, dim=-1)
        sorted_ = _Chunks(
            *(torch.unflatten(_sort(part, order), 3, (chunks, size)) for part in (query, key, value)),
            *(torch.unflatten(part, 3, (chunks, size)) for part in (order, bucket)),
        )
        mixed, weight = self._attend_chunks(sorted_, buckets)
        back = order.argsort(dim=-1)
        weight = weight.flatten(3).gather(-1, back).softmax(dim=2)
        mixed = mixed.flatten(3, 4).gather(3, back.unsqueeze(-1).expand(*back.shape, self.head_dim))
        y = (mixed * weight.unsqueeze(-1)).sum(dim=2)
        return y[:, :, :N].transpose(1, 2).to(parts.dtype)

    def _attend_chunks(self, own: _Chunks, padding: int) -> tuple[Tensor, Tensor]:
        """Return o [B, H, R, T, S, D] and z [B, H, R, T, S] of sorted tokens; `padding` is the bucket of no tokens."""
        whole = own.place.shape[3] == 1
        seen = own if whole else _Chunks(*(torch.cat((x.roll(1, dims=3), x), dim=4) for x in own))
        scores = own.query @ seen.key.mT
        bucket, place = seen.bucket.unsqueeze(-2), seen.place.unsqueeze(-2)
        itself = place == own.place.unsqueeze(-1)
        if self.form == "lra":
            visible = bucket != padding
        else:
            # The chunk in front of the first is the last; the two share a bucket only if all tokens do.
            visible = bucket == own.bucket.unsqueeze(-1)
            if not whole:
                T, S = visible.shape[3], self.chunk_size
                first = torch.arange(T, device=visible.device)[:, None, None] == 0
                visible = visible & ~(first & (torch.arange(2 * S, device=visible.device) < S))
            scores = scores.masked_fill(itself, SELF)
        # Every token sees at least itself, padding too, so that nothing here is a softmax of nothing.
        scores = scores.masked_fill(~(visible | itself), -math.inf)
        weight = scores.logsumexp(dim=-1)
        shares = F.dropout((scores - weight.unsqueeze(-1)).exp(), self.attn_drop, self.training)
        return shares @ seen.value, weight


def _sort(x: Tensor, order: Tensor) -> Tensor:
    """Return the tokens of x [B, H, N, D] in the order of every round [B, H, R, N]: [B, H, R, N, D]."""
    index = order.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
    return torch.unflatten(x.gather(2, index), 2, order.shape[2:])


class Linformer(ProjectedMixer):
    """Attention of Linformer (Wang et al., 2020).

    .. code-block:: text

        k'[r,h] = sum_n E[n,r] k[n,h],   v'[r,h] = sum_n F[n,r] v[n,h]
        y[n,h]  = softmax over r of ( q[n,h] . k'[r,h] / sqrt(D) ) applied to v'[:,h]

    E and F are learned and have a row per position, so the length is limited; shorter sequences take the first rows.
    They start Xavier-uniform. The official Long-Range Arena has ``rank=16`` and ``share="kv"`` in every task. It does
    not mask padding; here padding never counts. Tokens are numbered without padding, so a mask is a deletion.

    Arguments are those of `ProjectedMixer`, plus:

    Args:
        max_length: Longest sequence, L; padding inside a longer one does not help.
        rank: Number of mixtures, R.
        share: What shares a matrix: ``"kv"``, keys, values and all heads, so E = F; ``"heads"``, all heads, with one
            for keys and one for values; ``"none"``, nothing.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or another argument is out of its range.

    Example:
        >>> import torch, tost
        >>> tost.nn.Linformer(64, 4, max_length=100, rank=16)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_length: int,
        rank: int = 256,
        share: Literal["kv", "heads", "none"] = "heads",
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(embed_dim, num_heads, **projections)
        if share not in ("kv", "heads", "none"):
            raise ValueError(f"share={share!r} is not known; it takes 'kv', 'heads' or 'none'.")
        if max_length < 1 or rank < 1:
            raise ValueError(f"max_length={max_length} and rank={rank} must both be at least 1.")
        self.max_length, self.rank, self.share = max_length, rank, share
        shape = (1 if share == "kv" else 2, num_heads if share == "none" else 1, max_length, rank)
        bound = (6 / (max_length + rank)) ** 0.5
        self.mixtures = nn.Parameter(self.proj_in.weight.new_empty(shape).uniform_(-bound, bound))

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{super().extra_repr()}, max_length={self.max_length}, rank={self.rank}, share={self.share!r}"

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        if parts.shape[1] > self.max_length:
            raise ValueError(
                f"the sequence has {parts.shape[1]} tokens, but this module was made for max_length={self.max_length}. "
                f"Use a shorter sequence, or build it with max_length={parts.shape[1]} or more."
            )
        return real_first(self._attend_mixtures, parts, mask)

    def _attend_mixtures(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        # Keys and values of padding are zero, so it has no part in the mixtures.
        tables = self.mixtures[:, :, : parts.shape[1]].mT
        return self._softmax(query, tables[0] @ key, tables[-1] @ value).transpose(1, 2)
