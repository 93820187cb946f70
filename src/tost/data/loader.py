"""Loaders that remember their position, in numbers of samples that all processes together have consumed.

Position k of the global order (k = 0, 1, 2, ...) is sample ``permutation(seed, epoch)[k mod n]`` of epoch ``k // n``.
A step of W processes with b samples each takes the next ``W * b`` positions, process r the r-th of W contiguous slices.
So the samples of a step, read process after process, do not depend on how many processes share them.

Repeated augmentation changes two things. Every sample comes R times in a row, while an epoch has no more positions than
before: about n of them, and so about n / R different samples. And process r takes every W-th position of a step from
the r-th on, so that the versions of an image meet in one step but, with R processes or more, not on one process.

For data sets that draw something for each sample, the order gives *draw numbers* instead: ``round * n + sample``, where
a round is an epoch or, with repetitions, one repetition in it. So a draw number comes only once, and whatever is drawn
from it is the same for any number of processes and workers, and after a resume.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate

from tost.data._random import mix
from tost.data.dataset import Batch, Dataset, Sample
from tost.errors import StorageError, TostError

_ROUNDED_TO = 256  # DeiT's rule: an epoch with repetitions is cut to a multiple of this
_KILLED = (
    "a process that prepares batches was killed, perhaps for lack of memory. What was saved is intact: start again, a "
    "run with `--resume auto`, and with a smaller data.workers if it happens again."
)


class GlobalOrder:
    """An endless sequence of sample numbers: one permutation of all samples after another.

    Args:
        samples: n, at least 1.
        seed: With the epoch it decides the permutation.
        shuffle: False gives ``0 .. n-1`` in every epoch.
        repeats: R, how often each sample comes in a row.
        draws: Give draw numbers instead of sample numbers.

    Attributes:
        epoch: Positions per epoch: `samples`; with repetitions the largest multiple of 256 up to it, if there is one.
    """

    def __init__(self, samples: int, *, seed: int, shuffle: bool, repeats: int = 1, draws: bool = False) -> None:
        self.samples, self.seed, self.shuffle, self.repeats, self.draws = samples, seed, shuffle, repeats, draws
        self.epoch = samples if repeats == 1 or samples < _ROUNDED_TO else samples // _ROUNDED_TO * _ROUNDED_TO
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
        """Return the numbers at positions ``start .. stop - 1``, over as many epochs as they touch."""
        numbers: list[int] = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch)
            places = torch.arange(offset, min(self.epoch, offset + stop - start))
            samples = self.permutation(epoch)[places // self.repeats]
            if self.draws:
                samples = samples + (epoch * self.repeats + places % self.repeats) * self.samples
            numbers += samples.tolist()
            start += len(places)
        return numbers


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


@contextmanager
def watching_workers() -> Iterator[None]:
    """Raise a `StorageError` if a worker is killed in the body: torch notices by a signal and raises at any line."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise StorageError(_KILLED) from error


class Loader(DataLoader[Batch]):
    """One process's share of the batches, made by `make_loader`.

    `state_dict` counts what the training loop has received, not what workers have prepared ahead, and it counts for all
    processes together: it is the same on every process and fits a loader with another number of workers or processes.

    An infinite loader is one stream: every ``iter()`` continues where the last one stopped. A finite loader starts from
    the beginning with every ``iter()``.

    The batches are this process's share already; handing the loader to ``Accelerator.prepare`` would split them again.

    Args:
        dataset: Map-style data set.
        sampler: Which samples make up the batches.
        workers: Processes that prepare batches ahead; 0 for none.
        pin_memory: Put batches into memory that a GPU can copy from on its own.
    """

    def __init__(
        self, dataset: Dataset, sampler: ShardedBatchSampler, *, workers: int, pin_memory: bool = False
    ) -> None:
        super().__init__(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=partial(_collate, dataset),
            worker_init_fn=_leave_process_group,
            multiprocessing_context=_start_method() if workers else None,
            pin_memory=pin_memory,
            # Without a generator of its own, starting to iterate would draw from the global one.
            generator=torch.Generator().manual_seed(mix(sampler.order.seed)),
        )
        self._shares = sampler
        self._position = 0

    def check_worker_number_rationality(self) -> None:
        """Accept any number of workers: batches do not depend on it, so it is for the user to choose."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override] # torch's is an iterator with a length
        start = self._position if self._shares.infinite else 0
        self._shares.start = self._position = start
        try:
            with watching_workers():
                self._iterator = super().__iter__()
                for step, batch in enumerate(self._iterator, start=1):
                    self._position = self._shares.after(start, steps=step)
                    yield batch
        except TostError as error:
            kind = type(error)  # raised as it was: torch puts a worker's traceback in front of its message
            _, _, message = str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")
            raise kind(message.rstrip("\n")) from error
        except (ConnectionError, EOFError) as error:
            if not self.num_workers or str(error).startswith("Caught "):  # the data set's own error
                raise
            # torch's signal of a killed worker comes after its connection broke, and raises at any line.
            with suppress(RuntimeError):
                for _ in range(200):
                    if not all(worker.is_alive() for worker in getattr(self._iterator, "_workers", ())):
                        break
                    time.sleep(0.01)
            raise StorageError(_KILLED) from error
        finally:
            self._iterator = None  # the last reference: its workers end now and not when the loader goes

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the order that it counts in, as plain numbers; the same on every process."""
        return {"global_position": self._position, **self._order()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` continue after the last batch that was consumed when the state was taken.

        Args:
            state_dict: What `state_dict` returned, on any process and with any numbers of workers and processes.

        Raises:
            ValueError: The state is of another data set or another order, or is no such state.
        """
        here = self._order()
        state = {"repeats": 1, **state_dict}  # states from before there were repetitions lack it
        if missing := [key for key in ("global_position", *here) if key not in state]:
            raise ValueError(
                f"this is not the state of a loader: it lacks {', '.join(missing)}; pass what state_dict() returned."
            )
        if saved := {key: state[key] for key in here if state[key] != here[key]}:
            differs = ", ".join(f"{key}={value!r} instead of {here[key]!r}" for key, value in saved.items())
            raise ValueError(
                f"the position was saved with {differs}: the order of samples is another one. Resume with the same "
                "data and seed, or start a new run."
            )
        self._position = state["global_position"]

    def _order(self) -> dict[str, Any]:
        order = self._shares.order
        return {"samples": order.samples, "seed": order.seed, "shuffle": order.shuffle, "repeats": order.repeats}


def make_loader(
    dataset: Dataset,
    *,
    batch_size: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    shuffle: bool = True,
    infinite: bool = True,
    pin_memory: bool = False,
) -> Loader:
    """Return the loader of one process.

    All processes walk through one global order of samples, which depends on the data set's length and on `seed` only.
    A step takes the next ``world_size * batch_size`` samples of it, each process a contiguous slice. So with a fixed
    product the samples of a step are the same for any number of processes and workers.

    Args:
        dataset: Map-style data set. Its samples must not depend on random numbers of the worker that reads them; if
            its attribute `draws` is true, it gets draw numbers (see `Dataset`).
        batch_size: Samples per step of this process.
        seed: Decides the order of samples in every epoch.
        rank: This process, from 0.
        world_size: Number of processes that share the samples.
        workers: Processes that prepare batches ahead; 0 prepares them in this one.
        shuffle: False keeps the order of the data set.
        infinite: True continues with the next epoch for ever, inside a batch too: no sample is left out and none comes
            twice within an epoch. False makes one pass; see `make_evaluation_loader`.
        pin_memory: Put batches into memory that a GPU can copy from on its own, while the processor works.

    Returns:
        A loader of dictionaries of tensors ``[B, ...]``.

    Raises:
        ValueError: An argument is out of range, or there are no samples.

    Example:
        >>> from tost.data import DataOptions, build_data, make_loader
        >>> bundle = build_data(DataOptions(name="digits"), seed=0)
        >>> batch = next(iter(make_loader(bundle.train, batch_size=8, seed=0)))
        >>> batch["inputs"].shape
        torch.Size([8, 64, 1])
    """
    if len(dataset) < 1:
        raise ValueError("the data set has no samples; a loader needs at least one.")
    if batch_size < 1 or workers < 0 or not 0 <= rank < world_size:
        raise ValueError(
            f"batch_size={batch_size}, workers={workers}, rank={rank} of world_size={world_size}: need at least one "
            "sample per step, no negative number of workers, and a rank from 0 to world_size - 1."
        )
    repeats, draws = getattr(dataset, "repeats", 1), getattr(dataset, "draws", False)
    order = GlobalOrder(len(dataset), seed=seed, shuffle=shuffle, repeats=repeats, draws=draws)
    sampler = ShardedBatchSampler(order, batch_size=batch_size, rank=rank, world_size=world_size, infinite=infinite)
    return Loader(dataset, sampler, workers=workers, pin_memory=pin_memory)


class Share(TypedDict):
    """Arguments of `make_loader` that say which samples a process gets, and how."""

    batch_size: int
    rank: NotRequired[int]
    world_size: NotRequired[int]
    workers: NotRequired[int]
    pin_memory: NotRequired[bool]


def make_evaluation_loader(dataset: Dataset, **share: Unpack[Share]) -> Loader:
    """Return a loader that passes once over a data set, in its order, every sample on exactly one process.

    Every process gets the same number of batches, so that models whose processes talk to each other can be evaluated
    too. Only the last step is smaller; if it holds fewer samples than there are processes, some of them get a batch of
    no samples with the usual shapes (``[0, ...]``). Sums over samples, added over processes, are therefore exact.

    Args:
        dataset: Map-style data set.
        **share: `batch_size`, `rank`, `world_size`, `workers` and `pin_memory`, as in `make_loader`.

    Returns:
        A loader with a length.

    Raises:
        ValueError: An argument is out of range, or there are no samples.
    """
    return make_loader(dataset, seed=0, shuffle=False, infinite=False, **share)


def _collate(dataset: Dataset, samples: Batch | list[Sample]) -> Batch:
    """Return the batch that a data set gathered, or make one of a list of samples."""
    if isinstance(samples, dict):
        return samples
    if samples:
        batch: Batch = default_collate(samples)
        return batch
    return {key: value.new_empty((0, *value.shape)) for key, value in dataset[0].items()}


def _leave_process_group(worker: int) -> None:
    # Ctrl-C and launchers signal the whole group. The training process finishes its step and saves, and needs its
    # workers for that; they end with it, because each of them watches its parent.
    if hasattr(os, "setsid"):
        os.setsid()


def _start_method() -> str | None:
    # Forking shares the data without copying it, and workers run no parallel operations that could miss the parent's
    # threads. From 3.12 on Python warns about it, and a server without threads does the forking.
    if sys.platform != "linux":
        return None
    return "fork" if sys.version_info < (3, 12) else "forkserver"
