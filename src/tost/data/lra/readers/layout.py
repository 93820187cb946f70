"""Finding the files of the official release, and what all readers share.

The archive unpacks to a folder within a folder of the same name, ``lra_release/lra_release``. Some of its content is in
the outer folder once more; the inner copy is the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from tost.data.dataset import DataBundle, Dataset, fingerprint, spread
from tost.data.images.sources.base import find_folder
from tost.data.lra.options import SequenceOptions
from tost.data.lra.sequences import Form, Sequences, SequenceSource
from tost.data.spec import DataInfo
from tost.errors import ConfigError

_RELEASE = "lra_release"
_LONGEST_LINE = 1 << 26  # bytes


def find_release(path: Path, folder: str, needed: Sequence[str]) -> Path:
    """Return the folder that holds some files of the release.

    Args:
        path: That folder, or the release that holds it, or the folder that the release was unpacked to.
        folder: Its name in the release.
        needed: Names of files that must be in it.

    Raises:
        ConfigError: It is not there; the message lists what was looked for and what was found.
    """
    # From the innermost out: where there are two copies, the inner one counts.
    places = [path.joinpath(*[_RELEASE] * depth, folder) for depth in (2, 1, 0)]
    expected = f"lra_release, or at its folder {folder} with {' and '.join(needed)}"
    return find_folder(path, [*places, path], needed, expected)


def lines_of(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Return the lines of a file, which end at line feeds only.

    Raises:
        ConfigError: A line is longer than any text.
    """
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise ConfigError(f"{path} has a line of more than {_LONGEST_LINE:,} bytes; it is damaged.")
        yield line


def shuffled(count: int, seed: int) -> Tensor:
    """Return the numbers below `count` in the order that torch's `random_split` takes with this seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def split_80_10_10(order: Tensor) -> dict[str, Tensor]:
    """Cut rows into 80 % for training and 10 % each for validation and testing, the two rounded down."""
    tenth = len(order) // 10
    train = len(order) - 2 * tenth
    return {"train": order[:train], "val": order[train : train + tenth], "test": order[train + tenth :]}


def bundle(
    sets: Sequence[Dataset], content: str, details: Mapping[str, int | str], class_names: tuple[str, ...] = ()
) -> DataBundle:
    """Return two splits with their description; their lengths are added to the details.

    Args:
        sets: Training and validation set.
        content: Fingerprint of both.
        details: Facts for the record of a run.
        class_names: Names of the classes, if they are known.
    """
    train, validation = sets
    counts = {"train_samples": len(train), "validation_samples": len(validation)}
    info = DataInfo(fingerprint=content, details={**details, **counts}, class_names=class_names)
    return DataBundle(train=train, validation=validation, info=info)


def sequence_bundle(
    splits: Sequence[tuple[SequenceSource, Tensor, Tensor]],
    options: SequenceOptions,
    end: int,
    details: Mapping[str, int | str],
    class_names: tuple[str, ...] = (),
) -> DataBundle:
    """Return two splits of sequences.

    Args:
        splits: Source, labels by row, and rows to choose from, of the training and of the validation set.
        options: How sequences are cut and padded, and how many are taken.
        end: Id that ends a sequence, if the options ask for one.
        details: Facts for the record of a run.
        class_names: Names of the classes, if they are known.
    """
    form = Form.of(options, end)
    sets, parts = [], []
    for source, targets, rows in splits:
        chosen = spread(rows, options.limit)
        sets.append(Sequences(source, chosen, targets, form, towers=options.towers))
        parts += [*source.content(), targets, chosen]
    return bundle(sets, fingerprint(*parts), details, class_names)
