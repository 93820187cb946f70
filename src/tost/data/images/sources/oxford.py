"""Flowers-102 and Oxford-IIIT Pets, in the files and the splits in which Oxford publishes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tost.data.images.options import ImageOptions
from tost.data.images.sources.base import Split, find_folder
from tost.data.images.sources.folders import FileImages
from tost.data.images.sources.matlab import read_matlab
from tost.errors import ConfigError

_FLOWER_SPLITS = {"train": ["trnid"], "val": ["valid"], "trainval": ["trnid", "valid"], "test": ["tstid"]}


def open_flowers102(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``setid.mat``, ``imagelabels.mat`` and ``jpg/``; sorted by number, as the official splits have it."""
    expected = "the folder of jpg/, imagelabels.mat and setid.mat"
    # torchvision makes the sub-folder.
    place = find_folder(path, (path, path / "flowers-102"), ("jpg", "imagelabels.mat", "setid.mat"), expected)
    numbers = np.sort(np.concatenate(read_matlab(place / "setid.mat", _FLOWER_SPLITS[split], dtype=np.int64)))
    (labels,) = read_matlab(place / "imagelabels.mat", ["labels"], dtype=np.int64)
    if len(numbers) and not 1 <= numbers[0] <= numbers[-1] <= len(labels):
        raise ConfigError(
            f"{place / 'setid.mat'} names images {numbers[0]} to {numbers[-1]}, but imagelabels.mat has "
            f"{len(labels)} labels; the two files do not belong together."
        )
    names = [f"image_{number:05d}.jpg" for number in numbers.tolist()]
    _check_present(place / "jpg", names)
    return Split(
        source=FileImages(place / "jpg", names),
        targets=torch.from_numpy(labels[numbers - 1] - 1),
        class_names=_flower_names(),
        layout="official",
    )


def _flower_names() -> tuple[str, ...]:
    import tost._torchvision  # noqa: F401  prepares a CPU build of torch for torchvision

    # isort: split
    from torchvision.datasets import Flowers102  # type: ignore[import-untyped]

    return tuple(getattr(Flowers102, "classes", ()))  # older versions do not have them


def open_pets(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``annotations/trainval.txt`` or ``test.txt`` and ``images/``, in the order of the list."""
    expected = "the folder of images/ and annotations/"
    needed = ("images", f"annotations/{split}.txt")
    place = find_folder(path, (path, path / "oxford-iiit-pet"), needed, expected)
    file = place / "annotations" / f"{split}.txt"
    names: list[str] = []
    targets: list[int] = []
    breeds: dict[int, str] = {}
    for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) < 2 or not re.fullmatch("[1-9][0-9]{0,3}", words[1]):
            raise ConfigError(
                f"{file}, line {number}: {line.strip()!r} is no entry of an image, such as 'Abyssinian_100 1 1 1'."
            )
        label = int(words[1]) - 1
        names.append(f"{words[0]}.jpg")
        targets.append(label)
        breeds.setdefault(label, words[0].rpartition("_")[0].replace("_", " "))
    _check_present(place / "images", names)
    return Split(
        source=FileImages(place / "images", names),
        targets=torch.tensor(targets, dtype=torch.int64),
        class_names=tuple(breeds[label] for label in sorted(breeds)),
        layout="official",
    )


def _check_present(folder: Path, names: Sequence[str]) -> None:
    present = {entry.name for entry in folder.iterdir()}
    missing = [name for name in names if name not in present]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(names)} images of the split, such as {missing[0]}; "
            "the download is not complete."
        )
