"""Data sets whose samples say which they are, helpers that read loaders of several processes, and problems in words."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
import torch.utils.data
from pydantic import ValidationError

from tost._options import keys_of, translate
from tost.data import DataOptions, Dataset, find_data, list_data, make_loader


class Numbers(Dataset):
    """Sample i is the number i; gathers batches at once, as our data sets do."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def gather(self, indices):
        return {"inputs": indices.float().unsqueeze(1), "targets": indices}


class Draws(Numbers):
    """The same for a data set that draws: sample i is the draw number."""

    draws = True

    def __init__(self, samples, repeats=1):
        super().__init__(samples)
        self.repeats = repeats


class PlainNumbers(torch.utils.data.Dataset):
    """The same as a user might write it: one sample at a time."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"inputs": torch.tensor([float(index)]), "targets": torch.tensor(index)}


def numbers_of(batch):
    """The samples of a batch, after checking that its tensors belong together."""
    assert batch["inputs"].shape == (len(batch["targets"]), 1)
    assert torch.equal(batch["inputs"].squeeze(1).long(), batch["targets"])
    return batch["targets"].tolist()


def joined(lists):
    return list(chain.from_iterable(lists))


def step_by_step(loaders, steps=None):
    """What all processes take together in each step, process after process."""
    streams = [islice(iter(loader), steps) for loader in loaders]
    return [joined(map(numbers_of, batches)) for batches in zip(*streams, strict=True)]


def loaders(dataset, *, global_batch, world_size, **options):
    """One loader per process, at a fixed global batch."""
    batch_size = global_batch // world_size
    return [
        make_loader(dataset, batch_size=batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def messages(**given):
    """The problems of the data part of a configuration in words, by their keys."""
    with pytest.raises(ValidationError) as info:
        DataOptions(**given)
    keys = keys_of(DataOptions)
    if given["name"] in list_data():
        keys |= keys_of(find_data(given["name"]).options, "options.")
    return {problem.key: problem.text for problem in translate(info.value, keys)}


@contextmanager
def limited(gigabytes=4.0):
    """Let the process take this much more address space, and no more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + int(gigabytes * 2**30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
