"""ImageNet-1k as folders, tar files or parquet files, and the reassessed labels (ReaL) of its validation images."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.data.imagenet_info import ImageNetInfo
from timm.data.real_labels import RealLabelsImagenet

from tost._io import read_json
from tost.data.images.options import ImageNetOptions, split_names
from tost.data.images.sources.base import ImageSource, Split, check_folder, entries
from tost.data.images.sources.folders import FileImages, image_files, open_class_folders
from tost.data.images.sources.matlab import read_matlab
from tost.data.images.sources.parquet import find_shards, open_shards
from tost.data.images.sources.tar import index_tar, tar_source
from tost.errors import ConfigError

_IMAGES = 50_000  # of the validation set
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
_EXPECTED = (
    "a folder with train/<wnid>/<image> and val/<wnid>/<image>, with tar files such as ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar, or with parquet files such as train-*.parquet and validation-*.parquet"
)
_DEVKIT = "ILSVRC2012_devkit_t12/data"
_LABEL_FILES = ("LOC_val_solution.csv", "val.txt", f"{_DEVKIT}/ILSVRC2012_validation_ground_truth.txt")


@cache
def imagenet_classes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the identifiers (such as ``n01440764``) and the names of the 1000 classes, in the order of the labels."""
    info: Any = ImageNetInfo()
    identifiers = tuple(map(str, info.label_names()))
    return identifiers, tuple(info.label_name_to_description(name) for name in identifiers)


@cache
def _numbers(identifiers: tuple[str, ...]) -> Mapping[str, int]:
    return {identifier: label for label, identifier in enumerate(identifiers)}


def open_imagenet(options: ImageNetOptions, path: Path, split: str) -> Split:
    """Read ImageNet-1k from folders, tar or parquet files; the validation split with ReaL labels on request."""
    check_folder(path, _EXPECTED)
    found = replace(_open(path, split_names(split), split), class_names=imagenet_classes()[1])
    if options.real_labels is not None and split == options.validation_split:
        return replace(found, extra={"real": real_labels(options.real_labels, found.source)})
    return found


def _open(path: Path, names: Sequence[str], split: str) -> Split:
    if shards := find_shards(path, names):
        return open_shards(shards)
    for name in names:
        if (path / name).is_dir() and not any((path / name).glob("*.tar")):
            return _open_folder(path, path / name)
    if tars := _find_tars(path, names):
        return _open_tars(path, tars)
    raise ConfigError(f"{path} holds no split {split!r} of ImageNet, it has: {entries(path)}; data.path: {_EXPECTED}.")


def _open_folder(path: Path, folder: Path) -> Split:
    if any(entry.is_dir() for entry in folder.iterdir()):
        found = open_class_folders(folder)
        labels = _numbered(found.class_names, folder)
        return replace(found, targets=torch.tensor([labels[name] for name in found.class_names])[found.targets])
    files = image_files(folder)
    if not files:
        raise ConfigError(f"{folder} holds no images, it has: {entries(folder)}; expected {_EXPECTED}.")
    return Split(source=FileImages(folder, files), targets=_targets_of(files, path), layout="folder")


def _find_tars(path: Path, names: Sequence[str]) -> list[Path]:
    """Return the tar files whose names contain the split's as a word, without those of other tasks (``_t3``)."""
    pattern = re.compile(rf"(^|[-_./])({'|'.join(names)})([-_.]|$)")
    candidates = [*path.glob("*.tar"), *(file for name in names for file in (path / name).glob("*.tar"))]
    return sorted(
        file
        for file in candidates
        if pattern.search(file.relative_to(path).as_posix()) and not re.search(r"_t[0-9]$", file.stem)
    )


def _open_tars(path: Path, tars: Sequence[Path]) -> Split:
    members = index_tar(tars)
    if not members:
        raise ConfigError(f"{', '.join(map(str, tars[:3]))}: no images are in it.")
    folders = sorted({one.folder for one in members})
    if all(one.label is not None for one in members):
        targets = torch.tensor([one.label for one in members])
    elif len(folders) == 1:  # all in one place: not sorted into classes
        targets = _targets_of([one.name for one in members], path)
    else:
        labels = _numbered(folders, tars[0])
        targets = torch.tensor([labels[one.folder] for one in members])
    return Split(source=tar_source(tars, members), targets=targets, layout="tar")


def _numbered(found: Sequence[str], place: Path) -> Mapping[str, int]:
    """Return the label of each class identifier; all of them must be there, and no others."""
    identifiers, _ = imagenet_classes()
    unknown, missing = sorted(set(found) - set(identifiers)), sorted(set(identifiers) - set(found))
    if unknown or missing:
        raise ConfigError(
            f"{place} does not hold the {len(identifiers)} classes of ImageNet-1k: {len(missing)} are missing"
            f"{_such(missing)}, {len(unknown)} are unknown{_such(unknown)}; for other classes use the data set "
            "image_folder."
        )
    return {identifier: label for label, identifier in enumerate(identifiers)}


def _such(names: Sequence[str]) -> str:
    return f" (such as {names[0]})" if names else ""


def _targets_of(names: Sequence[str], path: Path) -> Tensor:
    """Return the labels of images that are not sorted into classes, as the published validation files are."""
    labels = _labels_by_image(path)
    stems = [PurePosixPath(name).name.partition(".")[0] for name in names]
    unknown = [stem for stem in stems if stem not in labels]
    if unknown:
        raise ConfigError(f"{len(unknown)} images have no label, such as {unknown[0]}; see the label files in {path}.")
    return torch.tensor([labels[stem] for stem in stems])


def _labels_by_image(path: Path) -> Mapping[str, int]:
    numbers = _numbers(imagenet_classes()[0])
    file = next((path / name for name in _LABEL_FILES if (path / name).is_file()), None)
    if file is None:
        raise ConfigError(
            f"the validation images in {path} are not sorted into classes, and there is no file with their labels; "
            f"add one of {', '.join(_LABEL_FILES)}, or sort the images into a folder per class."
        )
    try:
        if file.suffix == ".csv":
            with file.open(newline="", encoding="utf-8") as stream:
                return {row["ImageId"]: numbers[row["PredictionString"].split()[0]] for row in csv.DictReader(stream)}
        lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if file.name == "val.txt":
            by_text = {str(label): label for label in numbers.values()}
            return {name.partition(".")[0]: by_text[label] for name, label in lines}
        (synsets,) = read_matlab(file.with_name("meta.mat"), ["synsets"])
        by_number = {int(one["ILSVRC2012_ID"]): numbers.get(str(one["WNID"]), -1) for one in synsets}
        return {f"ILSVRC2012_val_{at:08d}": by_number[int(words[0])] for at, words in enumerate(lines, 1)}
    except (LookupError, ValueError, TypeError, AttributeError, csv.Error) as error:
        raise ConfigError(f"{file} is not the label file that its name promises: {error!r}") from error


def real_labels(file: str, source: ImageSource) -> Tensor:
    """Return the reassessed labels of validation images.

    Args:
        file: Path of ``real.json``: a list of labels for each of the 50,000 images, in the order of their numbers.
            ``"timm"`` takes the copy that timm holds.
        source: The images. Their numbers are in their file names.

    Returns:
        The labels of each image, padded with -1, int64 ``[N, M]``. Images that show none of the classes have none.

    Raises:
        ConfigError: The file is something else, or an image is not of the validation set.
    """
    lists = _read_real(file)
    longest = max(map(len, lists))
    padded = torch.tensor([[*one, *[-1] * (longest - len(one))] for one in lists], dtype=torch.int64)
    rows = [_NUMBER.search(source.file_name(row)) for row in range(len(source))]
    wrong = [row for row, found in enumerate(rows) if found is None or not 1 <= int(found[1]) <= len(lists)]
    if wrong:
        raise ConfigError(
            f"data.options.real_labels needs the original file names, such as ILSVRC2012_val_00000001.JPEG; "
            f"{len(wrong)} images have others, such as {source.name(wrong[0])}."
        )
    return padded[torch.tensor([int(found[1]) - 1 for found in rows if found])]


def _read_real(file: str) -> list[list[int]]:
    if file == "timm":
        holder: Any = RealLabelsImagenet
        by_name: dict[str, list[int]] = holder([""] * _IMAGES).real_labels
        return [by_name[name] for name in sorted(by_name)]
    lists = read_json(Path(file), error=ConfigError, hint="it is data.options.real_labels.")
    if not isinstance(lists, list) or not 0 < len(lists) <= _IMAGES or not all(map(_is_labels, lists)):
        raise ConfigError(
            f"data.options.real_labels {file} is something else; it must hold a list of labels per validation image."
        )
    return lists


def _is_labels(one: object) -> bool:
    return isinstance(one, list) and len(one) < 100 and all(type(label) is int and 0 <= label < 1000 for label in one)
