"""Finding the files of the official release, and what all readers share.

The archive unpacks to a folder within a folder of the same name, ``lra_release/lra_release``. Some of its content is in
the outer folder once more; the inner copy is the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tost.data.dataset import DataBundle, Dataset
from tost.data.images.sources.base import entries
from tost.data.spec import DataInfo
from tost.errors import ConfigError

_RELEASE = "lra_release"


def find_release(path: Path, folder: str, needed: Iterable[str]) -> Path:
    """Return the folder that holds some files of the release.

    Args:
        path: That folder, or the release that holds it, or the folder that the release was unpacked to.
        folder: Its name in the release.
        needed: Names of files that must be in it.

    Raises:
        ConfigError: It is not there; the message lists what was looked for and what was found.
    """
    needed = list(needed)
    wanted = " and ".join(needed)
    if not path.exists():
        raise ConfigError(
            f"data.path {path} does not exist; it must point at lra_release, or at its folder {folder} with {wanted}."
        )
    if not path.is_dir():
        raise ConfigError(f"data.path {path} is a file; it must point at a folder: {folder} with {wanted}.")
    # From the innermost out: where there are two copies, the inner one counts.
    places = [path.joinpath(*[_RELEASE] * depth, folder) for depth in (2, 1, 0)]
    for place in [*places, path]:
        if all((place / name).exists() for name in needed):
            return place
    for place in places:
        if place.is_dir():
            missing = [name for name in needed if not (place / name).exists()]
            raise ConfigError(f"{place} has no {' and no '.join(missing)}; it has: {entries(place)}.")
    raise ConfigError(
        f"{path} holds neither {folder} nor {wanted}, it has: {entries(path)}; point data.path at lra_release, or at "
        f"its folder {folder}."
    )


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
