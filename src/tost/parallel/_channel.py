"""The one place that talks to other processes: three collectives, each of them counted.

Nothing here is known to autograd; ``_autograd.py`` adds the derivatives. Nothing here is traced by ``torch.compile``
either: an exchange ends a graph, and what lies between two exchanges is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Exclude a function that exchanges data with other processes from ``torch.compile``."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # On the first call and not at import: the decorator loads the compiler, which takes seconds.
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return cast(_Function, call)


class Channel:
    """A process group as seen from one of its ranks, with a count of what this rank has sent.

    Attributes:
        group: The process group.
        rank: Number of this process within the group.
        size: Number of processes in the group.
        num_collectives: Collective calls so far.
        bytes_exchanged: Bytes of this rank's own contribution to them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.num_collectives = 0
        self.bytes_exchanged = 0

    @untraced
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, the same bits on each of them."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if self._count(total):
            dist.all_reduce(total, group=self.group)
        return total

    @untraced
    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Return what every rank holds, ``[size, ...]`` for each of the tensors, whatever their dtypes, in one call."""
        own = torch.cat([x.detach().reshape(-1).view(torch.uint8) for x in tensors])
        everyone = torch.empty(self.size, own.numel(), dtype=torch.uint8, device=own.device)
        if self._count(own):
            dist.all_gather(list(everyone.unbind(0)), own, group=self.group)
        parts = torch.split(everyone, [x.numel() * x.element_size() for x in tensors], dim=1)
        # Copied, because a part may start at an address that its dtype does not allow.
        return [
            part.clone(memory_format=torch.contiguous_format).view(-1).view(x.dtype).view(self.size, *x.shape)
            for x, part in zip(tensors, parts, strict=True)
        ]

    @untraced
    def broadcast(self, x: Tensor) -> Tensor:
        """Return the `x` of the first rank on every rank."""
        first = x.detach().clone(memory_format=torch.contiguous_format)
        if self._count(first):
            dist.broadcast(first, group=self.group, group_src=0)
        return first

    def _count(self, x: Tensor) -> bool:
        """Count a collective on `x`; an empty tensor, which is empty on every rank, needs none."""
        if x.numel() == 0:
            return False
        self.num_collectives += 1
        self.bytes_exchanged += x.numel() * x.element_size()
        return True
