"""The global order of samples, and the share of it that one process takes.

Position k of the order (k = 0, 1, 2, ...) is sample ``permutation(seed, epoch)[k mod n]`` of epoch ``k // n``. A step
of W processes with b samples each takes the next ``W * b`` positions, process r the r-th of W contiguous slices. So the
samples of a step, read process after process, do not depend on how many processes share them.

Repeated augmentation changes two things. Every sample comes R times in a row, while an epoch has no more positions than
before: about n of them, and so about n / R different samples. And process r takes every W-th position of a step from
the r-th on, so that the versions of an image meet in one step but, with R processes or more, not on one process.

For data sets that draw something for each sample, the order gives *draw numbers* instead: ``round * n + sample``, where
a round is an epoch or, with repetitions, one repetition in it. So a draw number comes only once, and whatever is drawn
from it is the same for any number of processes and workers, and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from tost.data._random import mix

# DeiT's rule: an epoch with repetitions is cut to a multiple of this.
_ROUNDED_TO = 256


def epoch_length(samples: int, repeats: int = 1) -> int:
    """Return the number of positions that make up an epoch.

    With repetitions it is the largest multiple of 256 up to `samples`, as in DeiT's sampler; below 256 samples, where
    that would be nothing, it is `samples`.

    Args:
        samples: Different samples that there are.
        repeats: How often each comes in a row.
    """
    if repeats == 1 or samples < _ROUNDED_TO:
        return samples
    return samples // _ROUNDED_TO * _ROUNDED_TO


class GlobalOrder:
    """An endless sequence of sample numbers: one permutation of all samples after another.

    Args:
        samples: n, at least 1.
        seed: With the epoch it decides the permutation.
        shuffle: False gives ``0 .. n-1`` in every epoch.
        repeats: R, how often each sample comes in a row.
        draws: Give draw numbers instead of sample numbers.

    Attributes:
        epoch: Positions per epoch.
    """

    def __init__(self, samples: int, *, seed: int, shuffle: bool, repeats: int = 1, draws: bool = False) -> None:
        self.samples, self.seed, self.shuffle, self.repeats, self.draws = samples, seed, shuffle, repeats, draws
        self.epoch = epoch_length(samples, repeats)
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def permutation(self, epoch: int) -> Tensor:
        """Return the sample numbers of one epoch in order, int64 ``[n]``; the latest epoch is kept."""
        if epoch != self._epoch:
            if self.shuffle:
                generator = torch.Generator().manual_seed(mix(self.seed, epoch))
                self._permutation = torch.randperm(self.samples, generator=generator)
            else:
                self._permutation = torch.arange(self.samples)
            self._epoch = epoch
        return self._permutation

    def indices(self, start: int, stop: int) -> list[int]:
        """Return what is at positions ``start .. stop - 1``, over as many epochs as they touch."""
        found: list[int] = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch)
            places = torch.arange(offset, min(self.epoch, offset + stop - start))
            samples = self.permutation(epoch)[places // self.repeats]
            if self.draws:
                samples = samples + (epoch * self.repeats + places % self.repeats) * self.samples
            found += samples.tolist()
            start += len(places)
        return found


class ShardedBatchSampler(Sampler[list[int]]):
    """The batches of one process, as sample or draw numbers, from `start` on.

    An infinite sampler runs on into the next epoch inside a batch. A finite one ends after one epoch; its last step
    shares what is left as evenly as possible. Every process gets the same number of batches, so that they can meet in
    collective operations; a batch of that last step may be smaller or empty.

    Args:
        order: The order that all processes share.
        batch_size: b, samples per step of this process.
        rank: r, this process.
        world_size: W, the number of processes.
        infinite: False to stop at the end of the first epoch.

    Attributes:
        start: Global position of the first sample of the next iteration.
    """

    def __init__(self, order: GlobalOrder, *, batch_size: int, rank: int, world_size: int, infinite: bool) -> None:
        self.order, self.rank, self.world_size, self.infinite = order, rank, world_size, infinite
        self.global_batch = batch_size * world_size
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        begin = self.start
        while self.infinite or begin < self.order.epoch:
            end = self.after(begin, steps=1)
            if self.order.repeats > 1:
                yield self.order.indices(begin, end)[self.rank :: self.world_size]
            else:
                first, last = ((end - begin) * rank // self.world_size for rank in (self.rank, self.rank + 1))
                yield self.order.indices(begin + first, begin + last)
            begin = end

    def after(self, position: int, *, steps: int) -> int:
        """Return the global position that follows a number of steps from `position`."""
        position += steps * self.global_batch
        return position if self.infinite else min(position, self.order.epoch)

    def __len__(self) -> int:
        if self.infinite:
            raise TypeError("an infinite loader has no length; take as many batches as there are steps.")
        return -(-self.order.epoch // self.global_batch)
