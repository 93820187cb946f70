"""A process group that shares one sequence: who holds which tokens, and which group is in force.

Rank r holds a contiguous piece of the tokens, in rank order. Pieces may differ in length, and may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tost.errors import BackendError
from tost.ops import GatedState, Packing, TSSAState
from tost.ops._dispatch import SHARING
from tost.ops._inputs import Inputs
from tost.ops.form import Form
from tost.ops.packing import Piece
from tost.ops.packing import find_packing as find_in_rows
from tost.ops.state import CausalArguments
from tost.parallel import causal, gated
from tost.parallel import tssa as plain
from tost.parallel._autograd import join_pieces, sum_over_ranks
from tost.parallel._channel import Channel


@dataclass(frozen=True, eq=False)
class SharedPacking(Packing):
    """A rank's piece of packed sequences: every sequence has an entry on every rank, empty where it has no token there.

    `ContextParallel.split_packing` makes it. Any other `Packing` knows the sequences of one rank only, and is refused
    where ranks share them.

    Attributes:
        whole: The packing of all ranks' tokens.
        context: The ranks.
    """

    whole: Packing
    context: ContextParallel

    def piece(self, begin: int, end: int) -> Piece:
        """Return how sequences lie in this rank's part of a piece that all ranks share, its tokens from begin to end.

        A rank holds its equal part of every such piece, one after the other, and not a part of the whole.
        """
        if self.shape[1] * self.context.size != self.whole.shape[1]:
            raise ValueError(
                f"rows of {self.whole.shape[1]} packed tokens cannot be taken in pieces by {self.context.size} ranks; "
                "make their length a multiple of that."
            )
        piece = self.whole.piece(begin * self.context.size, end * self.context.size)
        return piece._replace(packing=self.context.split_packing(piece.packing))


class ContextParallel:
    """The ranks that share one sequence, each with a contiguous piece of its tokens.

    Inside ``with context:`` the operators and every attention module work on the whole sequence, though they are given
    this rank's tokens only. Keep the backward pass inside too where layers are checkpointed, as they run again there.

    Gradients are those of the sum of the ranks' losses. A tensor that holds tokens gets its full gradient. A tensor
    that every rank has a copy of, such as a parameter, gets on each rank that rank's part; the sum of the parts, which
    data parallelism takes anyway, is its gradient. `mean_loss` gives a loss for which averaging does the same.

    All ranks of the group must make the same calls in the same order, with the same batch size.

    Args:
        group: The process group; None for all processes.

    Attributes:
        rank: Number of this process in the group; it holds the rank-th piece.
        size: Number of processes in the group.

    Raises:
        RuntimeError: torch.distributed has not been initialized.
        ValueError: This process is not in the group.

    Example:
        >>> import tempfile, torch, torch.distributed as dist, tost
        >>> from tost.parallel import ContextParallel
        >>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
        >>> attention, x = tost.TSSAttention(8, 2), torch.randn(1, 10, 8)
        >>> with ContextParallel() as context:
        ...     y = context.unsplit(attention(context.split(x)))
        >>> y.shape
        torch.Size([1, 10, 8])
        >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "context parallelism needs a process group, but torch.distributed is not initialized. "
                "Start the processes with torchrun and call torch.distributed.init_process_group first."
            )
        group = dist.group.WORLD if group is None else group
        if group is None or dist.get_rank(group) < 0:
            raise ValueError(
                f"process {dist.get_rank()} is not a member of the group it was given; "
                "give each process the group that it belongs to, as ContextParallel.from_mesh does."
            )
        self.channel = Channel(group)
        self.rank, self.size = self.channel.rank, self.channel.size

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, name: str = "context") -> Self:
        """Return the context of this process in one dimension of a device mesh.

        Args:
            mesh: A mesh with named dimensions, such as that of `make_mesh`.
            name: The dimension along which processes share a sequence.

        Raises:
            ValueError: The mesh has no dimension of that name.
        """
        names = mesh.mesh_dim_names or ()
        if name not in names:
            raise ValueError(
                f"the device mesh has no dimension {name!r}; it has {', '.join(map(repr, names)) or 'unnamed ones'}. "
                "Name one of them, or use make_mesh(data=..., context=...)."
            )
        return cls(mesh.get_group(name))

    def __enter__(self) -> Self:
        SHARING.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        SHARING.pop()

    def __repr__(self) -> str:
        return f"ContextParallel(rank={self.rank}, size={self.size})"

    @property
    def num_collectives(self) -> int:
        """Collective calls that this rank has made so far."""
        return self.channel.num_collectives

    @property
    def bytes_exchanged(self) -> int:
        """Bytes that this rank has sent in collectives so far: its own contribution, before any copying to others."""
        return self.channel.bytes_exchanged

    def split_lengths(self, num_tokens: int) -> list[int]:
        """Return the length of every rank's piece: as equal as can be, longer ones first."""
        quotient, rest = divmod(num_tokens, self.size)
        return [quotient + (rank < rest) for rank in range(self.size)]

    def split(self, x: Tensor, dim: int = 1, *, lengths: Sequence[int] | None = None) -> Tensor:
        """Return this rank's piece of `x`, which every rank holds in full. No exchange.

        Args:
            x: Anything with a dimension of tokens: ids, masks, tokens.
            dim: The dimension of tokens.
            lengths: Length of every rank's piece; None for `split_lengths`.

        Returns:
            A view of `x`. The gradient of `x` is, on each rank, that rank's part.

        Raises:
            ValueError: The lengths are not one per rank, or do not add up.
        """
        pieces = self.split_lengths(x.shape[dim]) if lengths is None else list(lengths)
        if len(pieces) != self.size or min(pieces) < 0 or sum(pieces) != x.shape[dim]:
            raise ValueError(
                f"lengths={pieces} cannot cut {x.shape[dim]} tokens into {self.size} pieces; "
                f"give one length per rank, {self.size} numbers that add up to {x.shape[dim]}, or leave it out."
            )
        return x.narrow(dim, sum(pieces[: self.rank]), pieces[self.rank])

    def split_packing(self, cu_seqlens: Tensor | Packing, *, lengths: Sequence[int] | None = None) -> SharedPacking:
        """Return how packed sequences lie in this rank's piece of their rows; ranks may begin anywhere in a sequence.

        Args:
            cu_seqlens: Cumulative lengths of the sequences in the whole row, int32 or int64 ``[S + 1]``, or the packing
                of whole rows; the same on every rank.
            lengths: Length of every rank's piece; None for `split_lengths`.

        Returns:
            What modules take as ``packing=``, operators and models as ``cu_seqlens=``, with S entries on every rank.

        Raises:
            ValueError: The lengths are not one per rank, or do not add up, or `cu_seqlens` has another form.
        """
        whole = cu_seqlens
        if not isinstance(whole, Packing):
            whole = Packing.from_cu_seqlens(whole, int(whole[-1]) if whole.numel() else 0)
        B, N = whole.shape
        here = self.split(torch.arange(N), dim=0, lengths=lengths)
        begin = int(here[0]) if len(here) else 0
        row, column = whole.cu_seqlens // max(N, 1), whole.cu_seqlens % max(N, 1)
        bounds = row * len(here) + (column - begin).clamp(0, len(here))
        return SharedPacking(bounds, (B, len(here)), whole, self)

    def unsplit(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the pieces of all ranks joined, on every rank: the inverse of `split`.

        The exchange is of the size of the sequence. Models do not need it; looking at a result does.

        Args:
            x: This rank's piece, of any length along `dim`.
            dim: The dimension of tokens.
        """
        return join_pieces(x, self.channel, dim % x.dim())

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, on every rank, as a model needs that averages over its tokens."""
        return sum_over_ranks(x, self.channel)

    def share(self, x: Tensor) -> Tensor:
        """Return the first rank's `x` on every rank, without a gradient: for random numbers that all must agree on."""
        return self.channel.broadcast(x)

    def offset(self, num_tokens: Tensor) -> Tensor:
        """Return how many tokens of each sequence are on the ranks before: the position of the first one here.

        Args:
            num_tokens: Real tokens of each sequence on this rank, int64 ``[B]``, such as ``mask.sum(dim=1)``. Their sum
                over all ranks is ``context.sum(num_tokens)``.
        """
        (counts,) = self.channel.gather(num_tokens)
        return counts[: self.rank].sum(dim=0)

    def tssa(self, inputs: Inputs, form: Form) -> Tensor:
        """Run `tost.tssa` on this rank's tokens; `tost.tssa` calls it inside ``with``."""
        require_shared(inputs.packing)
        return plain.tssa(inputs, form, self.channel)

    def causal_tssa(
        self, backend: str, packing: Packing | None, *given: *CausalArguments, overwrite: bool = False
    ) -> tuple[Tensor, TSSAState]:
        """Run the causal operators on this rank's tokens; the states are those of whole sequences, on every rank."""
        require_shared(packing)
        return causal.causal_tssa(backend, packing, *given, channel=self.channel)

    def gated_tssa(
        self,
        backend: str,
        packing: Packing | None,
        w: Tensor,
        write: Tensor,
        mask: Tensor | None,
        state: GatedState | None,
    ) -> tuple[Tensor, GatedState]:
        """Run `tost.gated_tssa` on this rank's tokens; the states are those of whole sequences, on every rank."""
        require_shared(packing)
        return gated.gated_tssa(backend, packing, w, write, mask, state, channel=self.channel)

    def mean_loss(self, loss_sum: Tensor, num_tokens: Tensor | int) -> Tensor:
        """Return this rank's share of a loss that is a mean over the tokens of the shared sequences.

        The mean of the shares over the ranks is the mean over all tokens. So it is what each rank calls ``backward`` on
        when gradients are averaged over all processes, as data parallelism does.

        Args:
            loss_sum: Sum of the loss over this rank's tokens, a scalar.
            num_tokens: How many tokens were summed here.

        Returns:
            ``size * loss_sum / (number of tokens on all ranks)``.
        """
        count = torch.as_tensor(num_tokens, device=loss_sum.device)
        return self.size * loss_sum / self.channel.all_reduce(count).clamp_min(1)


def require_shared(packing: Packing | None) -> None:
    """Refuse packed sequences of which only the pieces of one rank are known."""
    if packing is not None and not isinstance(packing, SharedPacking):
        raise BackendError(
            "a packed batch was described by the sequences of this rank alone, but a ContextParallel context is active "
            "and each rank holds a piece. Pass cu_seqlens=context.split_packing(cu_seqlens), given the whole row."
        )


def active() -> ContextParallel | None:
    """Return the context whose ``with`` block is being run, the innermost one; None outside of any."""
    return cast(ContextParallel, SHARING[-1]) if SHARING else None


def resolve(context: ContextParallel | None) -> ContextParallel:
    """Return the given context, or the active one.

    Raises:
        RuntimeError: There is neither.
    """
    context = active() if context is None else context
    if context is None:
        raise RuntimeError(
            "no context is active and none was given, so there is no group to share the sequence with. "
            "Pass context=ContextParallel(...), call inside `with ContextParallel(...):`, or use tost.ops."
        )
    return context


def find_packing(
    shape: tuple[int, ...],
    cu_seqlens: Tensor | Packing | None,
    segment_ids: Tensor | None,
    *,
    chunk: int | None = None,
) -> Packing | None:
    """Return the packing of tokens [B, N] that a caller describes in one of two ways; None without any.

    In an active context `cu_seqlens` is that of the whole row, the same on every rank, and `segment_ids` are those of
    this rank's tokens, which are then exchanged.

    Args:
        shape: ``(B, N)`` of the tokens here.
        cu_seqlens: Cumulative lengths of the sequences in one row, ``[S + 1]``; or a packing, which is returned.
        segment_ids: The sequence of each token, ``[B, N]``.
        chunk: Tokens of a piece, where this rank holds its part of every piece and not one of the whole.

    Raises:
        ValueError: Both are given, or what is given is not of this form.
    """
    context = active()
    if context is not None and (cu_seqlens is None) != (segment_ids is None) and not isinstance(cu_seqlens, Packing):
        cu_seqlens, segment_ids = _shared_packing(context, cu_seqlens, segment_ids, chunk), None
    return find_in_rows(shape, cu_seqlens, segment_ids)


def _shared_packing(
    context: ContextParallel, cu_seqlens: Tensor | None, segment_ids: Tensor | None, chunk: int | None
) -> SharedPacking:
    if cu_seqlens is not None:
        return context.split_packing(cu_seqlens)
    assert segment_ids is not None
    (counts,) = context.channel.gather(torch.tensor(segment_ids.shape[1], device=segment_ids.device))
    lengths: list[int] = counts.tolist()
    if chunk is None:
        whole = context.unsplit(segment_ids)
    elif len(set(lengths)) > 1:
        raise ValueError(
            f"with chunk={chunk} the ranks have {lengths} tokens; they share every piece equally. Make the number of "
            "tokens a multiple of that of the ranks."
        )
    else:
        (pieces,) = context.channel.gather(segment_ids)
        whole = torch.cat([part for piece in torch.split(pieces, chunk, dim=2) for part in piece], dim=1)
    return context.split_packing(Packing.from_segment_ids(whole), lengths=lengths)


def make_mesh(*, data: int = 1, context: int = 1, device_type: str = "cpu") -> DeviceMesh:
    """Arrange all processes as `data` groups of `context` ranks; neighbours share a sequence.

    Args:
        data: Number of groups that work on different sequences.
        context: Number of ranks that share one sequence.
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        A device mesh with the dimensions ``"data"`` and ``"context"``.

    Raises:
        ValueError: A size is below 1, or their product is not the number of processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else data * context
    if data < 1 or context < 1 or data * context != world:
        raise ValueError(
            f"data={data} times context={context} is {data * context}, but there are {world} processes; "
            "both must be at least 1 and their product the number of processes. Change one, or start more processes."
        )
    return init_device_mesh(device_type, (data, context), mesh_dim_names=("data", "context"))
