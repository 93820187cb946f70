"""Map-style data sets whose samples are dictionaries of tensors, and the pair of splits that a recipe trains on.

A sample has "inputs" and "targets", and "mask" (True on real tokens) where sequences are padded. A batch of packed
sequences has "segment_ids" or "cu_seqlens" (see `tost.Packing`); with the latter all of them are in one row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from tost.data.registry import DataOptions, find_data
from tost.data.spec import DataInfo
from tost.errors import ConfigError

Sample = dict[str, Tensor]
"""One sample: "inputs", "targets", and "mask" where sequences are padded."""
Batch = dict[str, Tensor]
"""Samples with the batch as their first axis."""
IGNORED = -100
"""Target without a loss."""

_PIECES, _PIECE_BYTES = 512, 1 << 17  # of files that are read for a fingerprint
_SAMPLES = 16  # of each split, for data without a fingerprint of its own


class Dataset(torch.utils.data.Dataset[Sample]):
    """Base of tost's data sets: samples by number, gathered a batch at a time.

    A subclass implements `__len__` and `gather`. A sample depends on its number only, whenever and wherever it is read.
    A batch comes from one indexing operation, and a batch of no samples keeps its shapes.

    A data set that draws something at random for each sample, such as the place of a crop, sets `draws`. The loader
    then passes draw numbers ``round * n + sample``, n being the length, and every number means another draw. Draws
    must follow from that number and from the seed with which the data set was built alone.

    Attributes:
        draws: Whether `gather` takes draw numbers. A number below n, round 0, is a sample number as well.
        repeats: How often in a row a loader gives each sample, in different draws.
    """

    draws: bool = False
    repeats: int = 1

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    def gather(self, indices: Tensor) -> Batch:
        """Return samples as a batch.

        Args:
            indices: Which, int64 ``[B]``, each in ``[0, len)``; any draw number from 0 on if the data set draws.

        Returns:
            Tensors whose first axis is B; of sequences that are packed into one row, only the targets.
        """
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        # A plain `for sample in dataset` ends at this error.
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} does not exist; this data set has samples 0 to {len(self) - 1}.")
        return {key: value[0] for key, value in self.gather(torch.tensor([index])).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        # torch's loaders prefer this method when it exists.
        return self.gather(torch.tensor(indices, dtype=torch.int64))


class TensorDataset(Dataset):
    """Samples held in memory, one row of every tensor each.

    Args:
        rows: Tensors with the same first axis. Those of type uint8 are a compact form of ids, given out as int64.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self.rows = dict(rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows["targets"])

    def gather(self, indices: Tensor) -> Batch:
        """Return rows as a batch."""
        taken = {key: value[indices] for key, value in self.rows.items()}
        return {key: value.long() if value.dtype == torch.uint8 else value for key, value in taken.items()}


@dataclass(frozen=True, kw_only=True)
class DataBundle:
    """The two splits of a data set and facts about it.

    Attributes:
        train: Samples to train on, in any map-style data set whose samples are dictionaries of tensors.
        validation: Samples to evaluate.
        info: Facts about both; `build_data` fills in missing ones.
    """

    train: Dataset
    validation: Dataset
    info: DataInfo = field(default_factory=DataInfo)


def spread(rows: Tensor, count: int | None) -> Tensor:
    """Return `count` of the rows, evenly spaced; all of them if there are no more, or if it is None."""
    return rows if count is None or count >= len(rows) else rows[torch.arange(count) * len(rows) // count]


def fingerprint(*parts: Tensor) -> str:
    """Return the SHA-256 of tensors, their types and shapes, in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
        part = part.detach().cpu()
        # NumPy knows no bfloat16.
        digest.update((part.view(torch.int16) if part.itemsize == 2 else part).numpy().tobytes())
    return digest.hexdigest()


def hash_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of pieces of files, in hexadecimal; of all bytes if there are few.

    A few hundred files, evenly spaced, are read. Missing files count as empty.
    """
    digest = hashlib.sha256()
    chosen = files if len(files) <= _PIECES else [files[at * len(files) // _PIECES] for at in range(_PIECES)]
    pieces = max(1, _PIECES // max(1, len(chosen)))
    for file in chosen:
        with suppress(OSError), file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{size}\n".encode())
            for place in range(0, size, max(_PIECE_BYTES, size // pieces)):
                stream.seek(place)
                digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()


def build_data(options: DataOptions, seed: int) -> DataBundle:
    """Return the training and the validation set of a configuration.

    Args:
        options: The ``data`` part of a configuration.
        seed: Decides everything that is drawn at random when the data is made. The order of training is decided by
            the seed of the loader.

    Returns:
        Both splits, and facts about them.

    Raises:
        ConfigError: The options ask for data that cannot be made here, or the function that was registered for it
            returns something else than data.
    """
    spec = find_data(options.name)
    bundle = _bundle(options.name, spec.make(options.data_set_options(), options.path, seed))
    shape = options.shape()
    fields = vars(shape) if shape.input is not None else {}
    info = replace(bundle.info, name=options.name, **fields)
    if not info.fingerprint:
        # Data that has none of its own is identified by its name, options and lengths, and by a few samples.
        splits = [bundle.train, bundle.validation]
        content = [options.name, options.model_dump(mode="json")["options"], [len(split) for split in splits]]
        numbers = [(split, number) for split in splits for number in spread(torch.arange(len(split)), _SAMPLES)]
        samples = [fingerprint(*split[int(number)].values()) for split, number in numbers]
        text = json.dumps([content, samples], sort_keys=True)
        info = replace(info, fingerprint=hashlib.sha256(text.encode()).hexdigest())
    return replace(bundle, info=info)


def _bundle(name: str, built: Any) -> DataBundle:
    """Check what a builder returned, and make it a bundle."""
    if isinstance(built, DataBundle):
        return built
    is_pair = isinstance(built, tuple | list) and len(built) == 2
    for dataset in built if is_pair else [built]:
        is_indexed = is_pair and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        is_indexed = is_indexed and not isinstance(dataset, torch.utils.data.IterableDataset)
        sample = dataset[0] if is_indexed and len(dataset) else {}
        is_sample = isinstance(sample, dict) and all(isinstance(value, Tensor) for value in sample.values())
        if not is_indexed or not is_sample:
            given = f"a {type(dataset).__name__}" + f" with samples of type {type(sample).__name__}" * (not is_sample)
            raise ConfigError(
                f"the function of data set {name!r} returned {given}; it must return a training and a validation set, "
                "as a pair or as a DataBundle: map-style data sets whose samples are dictionaries of tensors, such as "
                '{"inputs": ..., "targets": ...}.'
            )
    train, validation = built
    return DataBundle(train=train, validation=validation)
