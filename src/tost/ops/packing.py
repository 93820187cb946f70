"""Packed sequences: several of them, of any lengths, one after the other in the rows of a batch, without padding.

Users describe them by ``cu_seqlens``, as flash-attention and fla do, or by ``segment_ids``. Both become one `Packing`,
made and checked once per forward pass, which travels through the layers. Rows do not matter to it: it numbers the T =
B * N tokens of a batch through, and an operator sees them as one row, ``[1, T, ...]``.

Shapes: cu_seqlens [S + 1] for S sequences, segment_ids, mask [B, N], x [B, N, ...]; states and windows have S entries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tost.ops._transforms import has_values

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the sequences of a packed batch begin and end.

    Make it with `from_cu_seqlens` or `from_segment_ids`; modules take it as ``packing=``. Operators and models take
    ``cu_seqlens=`` and ``segment_ids=`` and make it themselves.

    Attributes:
        cu_seqlens: First token of each sequence, in the batch as one row, and the number of all tokens; int64
            ``[S + 1]``. A sequence may be empty.
        shape: ``(B, N)`` of the batch.

    Example:
        >>> import torch, tost
        >>> packing = tost.Packing.from_segment_ids(torch.tensor([[1, 1, 1, 2, 2, 3]]))
        >>> packing.cu_seqlens.tolist(), packing.positions().tolist()
        ([0, 3, 5, 6], [[0, 1, 2, 0, 1, 0]])
    """

    cu_seqlens: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int) -> Packing:
        """Return the packing of one row, described as for flash-attention.

        Args:
            cu_seqlens: Cumulative lengths, int32 or int64 ``[S + 1]``: 0, the length of the first sequence, that of the
                first two, ..., and `num_tokens`.
            num_tokens: Tokens in the row, N.

        Raises:
            ValueError: `cu_seqlens` has another form, or does not cover the row. Numbers are only looked at on a CPU,
                and not while compiling.
        """
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in _INTEGERS or len(cu_seqlens) == 0:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; it is an int32 tensor "
                "[S + 1] for S sequences, with 0 in front. Use F.pad(lengths.cumsum(0), (1, 0)).int()."
            )
        if has_values(cu_seqlens):
            first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
            if first != 0 or last != num_tokens or bool((cu_seqlens.diff() < 0).any()):
                raise ValueError(
                    f"cu_seqlens goes from {first} to {last}, but there are {num_tokens} tokens in the row; it has to "
                    f"begin with 0, end with {num_tokens} and never decrease. Use F.pad(lengths.cumsum(0), (1, 0))."
                )
        return cls(cu_seqlens.long(), (1, num_tokens))

    @classmethod
    def from_segment_ids(cls, segment_ids: Tensor) -> Packing:
        """Return the packing of tokens that name their sequences.

        Args:
            segment_ids: Integers ``[B, N]``. Neighbours with the same id are one sequence, and rows do not share any.
                Sequences are numbered in the order in which they come, row after row.

        Raises:
            ValueError: It has another form, or an id comes back after another one in its row.
        """
        if segment_ids.dim() != 2 or segment_ids.is_floating_point() or segment_ids.is_complex():
            raise ValueError(
                f"segment_ids have shape {tuple(segment_ids.shape)} and dtype {segment_ids.dtype}; they are integers "
                "[B, N], one per token."
            )
        B, N = segment_ids.shape
        begins = torch.ones(B, N, dtype=torch.bool, device=segment_ids.device)
        begins[:, 1:] = segment_ids.diff(dim=1) != 0
        if has_values(segment_ids) and N > 0:
            different = 1 + (segment_ids.sort(dim=1).values.diff(dim=1) != 0).sum(dim=1)
            if bool((returned := begins.sum(dim=1) > different).any()):
                row = int(returned.nonzero()[0])
                raise ValueError(
                    f"in row {row} of segment_ids an id comes back after another one; the tokens of a sequence lie "
                    "side by side. Sort the tokens by their ids, or give each piece an id of its own."
                )
        starts = begins.flatten().nonzero().flatten()
        return cls(torch.cat((starts, starts.new_full((1,), B * N))), (B, N))

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S."""
        return len(self.cu_seqlens) - 1

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence. On a GPU this waits for the device, once."""
        return self.cu_seqlens.diff().tolist()

    @property
    def sequence(self) -> Tensor:
        """The sequence that each token belongs to, int64 ``[T]``."""
        # A compiler does not see through the lock of a cached property, and finds equal expressions itself.
        return self._find_sequence() if torch.compiler.is_compiling() else self._sequence

    @cached_property
    def _sequence(self) -> Tensor:
        return self._find_sequence()

    def _find_sequence(self) -> Tensor:
        tokens = torch.arange(self.shape[0] * self.shape[1], device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens[1:], tokens, right=True)

    def one_row(self, x: Tensor) -> Tensor:
        """Return x [B, N, ...] as [1, T, ...]."""
        return x.reshape(1, self.shape[0] * self.shape[1], *x.shape[2:])

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return what x [S, ...] holds for the sequence of each token, [B, N, ...]."""
        return x.index_select(0, self.sequence).reshape(*self.shape, *x.shape[1:])

    def positions(self, mask: Tensor | None = None, start: Tensor | None = None) -> Tensor:
        """Return the number of each token in its sequence, int64 ``[B, N]``; 0 for padding.

        Args:
            mask: Real tokens, bool ``[B, N]``; padding does not count.
            start: Tokens that came before, int64 ``[S]``.
        """
        if mask is None:
            index = torch.arange(len(self.sequence), device=self.cu_seqlens.device)
            before = self.cu_seqlens[:-1]
        else:
            counts = torch.cat((self.cu_seqlens.new_zeros(1), mask.flatten().cumsum(0)))
            index, before = counts[1:] - 1, counts[self.cu_seqlens[:-1]]
        if start is not None:
            before = before - start
        index = (index - before.index_select(0, self.sequence)).reshape(self.shape)
        return index if mask is None else index.where(mask, 0)

    def num_tokens(self, mask: Tensor | None = None) -> Tensor:
        """Return the number of tokens of each sequence, padding not counted, int64 ``[S]``."""
        if mask is None:
            return self.cu_seqlens.diff()
        return torch.cat((self.cu_seqlens.new_zeros(1), mask.flatten().cumsum(0)))[self.cu_seqlens].diff()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the tokens of each sequence, from x [B, N, ...] to [S, ...]."""
        total = x.new_zeros(self.num_sequences, *x.shape[2:])
        return total.index_add(0, self.sequence, x.flatten(0, 1))

    def prepend(self, x: Tensor, first: Tensor) -> tuple[Tensor, Packing]:
        """Put tokens in front of every sequence.

        Args:
            x: Tokens, ``[B, N, ...]``.
            first: What comes before those of each sequence, ``[S, K, ...]``.

        Returns:
            All of them in one row, ``[1, T + S K, ...]``, and their packing.
        """
        S, K = first.shape[:2]
        # Where the tokens go: behind those of their own sequence and of the ones before. The others fill the gaps.
        place = torch.arange(len(self.sequence), device=x.device) + (self.sequence + 1) * K
        heads = self.cu_seqlens[:-1] + torch.arange(S, device=x.device) * K
        heads = (heads.unsqueeze(1) + torch.arange(K, device=x.device)).flatten()
        source = torch.empty(len(place) + S * K, dtype=torch.int64, device=x.device)
        source[torch.cat((heads, place))] = torch.arange(len(source), device=x.device)
        row = torch.cat((first.flatten(0, 1), x.flatten(0, 1))).index_select(0, source).unsqueeze(0)
        longer = self.cu_seqlens + torch.arange(S + 1, device=x.device) * K
        return row, Packing(longer, (1, len(source)))

    def piece(self, begin: int, end: int) -> Piece:
        """Return how sequences lie in the tokens from `begin` to `end` of every row.

        Sequences that have no token there are left out; a row of no tokens is one empty sequence.
        """
        (B, N), width = self.shape, end - begin
        bounds, goes_on, last = [], [], []
        for row in range(B):
            first = row * N + begin
            inside = self._cuts[bisect_right(self._cuts, first) : bisect_left(self._cuts, first + width)]
            bounds += [row * width, *(row * width + cut - first for cut in inside)]
            goes_on += [row if first not in self._begins and begin > 0 else -1, *(-1 for _ in inside)]
            last.append(len(bounds) - 1)
        device = self.cu_seqlens.device
        packing = Packing(torch.tensor([*bounds, B * width], device=device), (B, width))
        vars(packing)["lengths"] = [end - first for first, end in pairwise((*bounds, B * width))]  # no need to wait
        return Piece(packing, torch.tensor(goes_on, device=device), torch.tensor(last, device=device))

    @cached_property
    def _begins(self) -> frozenset[int]:
        return frozenset(accumulate(self.lengths, initial=0))

    @cached_property
    def _cuts(self) -> list[int]:
        return sorted(self._begins)

    def without_padding(self, mask: Tensor) -> tuple[Tensor, Packing]:
        """Return the numbers of the real tokens, int64 [R], and the packing of these alone, in one row."""
        real = mask.flatten().nonzero().flatten()
        counts = torch.cat((self.cu_seqlens.new_zeros(1), mask.flatten().cumsum(0)))
        return real, Packing(counts[self.cu_seqlens], (1, len(real)))

    def rows(self) -> Group:
        """Return all sequences, padded to the longest."""
        return self._group(range(self.num_sequences))

    def groups(self, lengths: Sequence[int] | None = None) -> Iterator[Group]:
        """Return the sequences in a few groups, padded to the longest of each, which is less than twice the others.

        Args:
            lengths: Lengths to group by, where they are not those of the tokens here.
        """
        by_size: dict[int, list[int]] = {}
        for sequence, length in enumerate(self.lengths if lengths is None else lengths):
            by_size.setdefault(length.bit_length(), []).append(sequence)
        return map(self._group, by_size.values())

    def _group(self, members: Sequence[int]) -> Group:
        device, lengths = self.cu_seqlens.device, [self.lengths[i] for i in members]
        longest = max(lengths, default=0)
        sequences = torch.tensor([*members], dtype=torch.int64, device=device)
        within = torch.arange(longest, device=device)
        real = None
        if min(lengths, default=0) < longest:
            real = within < self.cu_seqlens.diff()[sequences].unsqueeze(1)
            within = within * real
        tokens = self.cu_seqlens[sequences].unsqueeze(1) + within
        return Group(sequences, tokens.clamp_max(self.shape[0] * self.shape[1] - 1), real)  # an empty one has no first


class Piece(NamedTuple):
    """Some columns of a packed batch of B rows.

    Attributes:
        packing: How the sequences lie there; S of them have a token.
        goes_on: For each the row whose text it goes on with, -1 if it begins here; int64 ``[S]``.
        last: The sequence of the last token of every row, int64 ``[B]``.
    """

    packing: Packing
    goes_on: Tensor
    last: Tensor


class Group(NamedTuple):
    """Sequences of similar lengths.

    Attributes:
        sequences: Which they are, int64 ``[R]``.
        tokens: Their tokens, int64 ``[R, L]``; past the end of a sequence any token.
        real: Where the sequences are, bool ``[R, L]``; None if all have L tokens.
    """

    sequences: Tensor
    tokens: Tensor
    real: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Return the tokens of the group, from x [B, N, ...] to a padded batch [R, L, ...]."""
        taken = x.flatten(0, 1).index_select(0, self.tokens.flatten())
        return taken.reshape(*self.tokens.shape, *x.shape[2:])

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the real tokens of the padded batch, bool [R, L], given those of the packed one [B, N]."""
        if mask is None or self.real is None:
            return self.real if mask is None else self.take(mask)
        return self.take(mask) & self.real

    def put(self, y: Tensor, like: Tensor) -> Tensor:
        """Return the padded batch y [R, L, ...] as a packed one, [B, N, ...] as in `like`; 0 where it has no token."""
        return put_tokens([y], [self], like)


def put_tokens(batches: Sequence[Tensor], groups: Sequence[Group], like: Tensor) -> Tensor:
    """Return padded batches [R, L, ...], one for each group, as a packed one, [B, N, ...] as in `like`.

    Padding goes to a row of its own behind the others, which is cut off: picking the real tokens would have to wait for
    the device to count them.
    """
    total = like.shape[0] * like.shape[1]
    tokens = [x.tokens if x.real is None else x.tokens.where(x.real, total) for x in groups]
    y = torch.cat([batch.flatten(0, 1) for batch in batches])
    rows = y.new_zeros(total + 1, *y.shape[1:]).index_copy(0, torch.cat([x.flatten() for x in tokens]), y)
    return rows[:total].reshape(*like.shape[:2], *y.shape[1:])


def count_tokens(
    num_tokens: int,
    mask: Tensor | None = None,
    packing: Packing | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the number of real tokens of each sequence in rows of `num_tokens`, int64.

    It is ``[B]`` with a mask ``[B, num_tokens]``, ``[S]`` for packed sequences, and otherwise ``[1]``, for all of them.
    """
    if packing is not None:
        return packing.num_tokens(mask)
    return torch.tensor([num_tokens], device=device) if mask is None else mask.sum(dim=1)


def find_packing(
    shape: tuple[int, ...], cu_seqlens: Tensor | Packing | None, segment_ids: Tensor | None
) -> Packing | None:
    """Return the packing of tokens [B, N] that a caller describes in one of the two ways; None without any.

    Args:
        shape: ``(B, N)`` of the tokens.
        cu_seqlens: Cumulative lengths of the sequences in one row, ``[S + 1]``; or a packing, which is returned.
        segment_ids: The sequence of each token, ``[B, N]``.

    Raises:
        ValueError: Both are given, or what is given is not of this form.
    """
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError("cu_seqlens and segment_ids both say where sequences begin; pass one of them.")
    if segment_ids is not None:
        packing = Packing.from_segment_ids(segment_ids)
    elif isinstance(cu_seqlens, Packing):
        packing = cu_seqlens
    elif cu_seqlens is not None:
        if shape[0] != 1:
            raise ValueError(
                f"cu_seqlens describes sequences in one row, but there are {shape[0]}; put all of them into one, "
                "[1, N, ...], or use segment_ids."
            )
        packing = Packing.from_cu_seqlens(cu_seqlens, shape[1])
    else:
        return None
    if packing.shape != tuple(shape):
        raise ValueError(
            f"the sequences are packed into {packing.shape[0]} rows of {packing.shape[1]} tokens, but the batch has "
            f"{shape[0]} rows of {shape[1]}; segment_ids have one entry per token."
        )
    return packing
