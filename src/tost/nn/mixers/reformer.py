"""Reformer: attention among tokens that fall into the same bucket of a locality-sensitive hash.

Written here because the class in transformers takes lengths that are multiples of the chunk only in training, draws new
hashes at every call, and lets a query see other buckets.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, H, N, D] with C = H * D, buckets [B, H, R, N] with R rounds of
hashing, chunks [B, H, R, T, S, ...] with T chunks of S tokens, mask [B, N].
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn.mixers.base import ProjectedMixer, real_first
from tost.ops._numerics import statistics_dtype

MOST_BUCKETS = 1024
"""Buckets for which a module has rotations."""
LRA_BUCKETS = 10
SELF = -5e4
"""Score of a token with itself: only one that sees no other attends to it."""


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
                visible = visible & self._is_before(visible)
            scores = scores.masked_fill(itself, SELF)
        # Every token sees at least itself, padding too, so that nothing here is a softmax of nothing.
        scores = scores.masked_fill(~(visible | itself), -math.inf)
        weight = scores.logsumexp(dim=-1)
        shares = F.dropout((scores - weight.unsqueeze(-1)).exp(), self.attn_drop, self.training)
        return shares @ seen.value, weight

    def _is_before(self, like: Tensor) -> Tensor:
        """Return False for what the first chunk sees of the one in front of it, which is none, [T, 1, 2 S]."""
        T, S = like.shape[3], self.chunk_size
        first = torch.arange(T, device=like.device)[:, None, None] == 0
        return ~(first & (torch.arange(2 * S, device=like.device) < S))


def _sort(x: Tensor, order: Tensor) -> Tensor:
    """Return the tokens of x [B, H, N, D] in the order of every round [B, H, R, N]: [B, H, R, N, D]."""
    index = order.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
    return torch.unflatten(x.gather(2, index), 2, order.shape[2:])
