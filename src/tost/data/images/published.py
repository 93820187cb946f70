"""Data sets in the files in which they are published: Fashion-MNIST, CIFAR, Flowers-102, Oxford-IIIT Pets, ImageNet."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tost._io import read_pieces
from tost.data._tables import columns_of
from tost.data.dataset import fingerprint
from tost.data.images.options import ImageNetOptions, ImageOptions, split_names
from tost.data.images.sources import (
    FileImages,
    ImageSource,
    Split,
    check_folder,
    find_folder,
    find_shards,
    open_class_folders,
    open_shards,
    wrong_place,
)
from tost.data.images.transforms import to_grey
from tost.errors import ConfigError

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_LARGEST = 1 << 30  # bytes of one file of small images, unpacked


class MemoryImages(ImageSource):
    """Images in memory.

    Args:
        pixels: uint8 ``[N, 1 or 3, height, width]``.
        title: What to call them in messages.
    """

    def __init__(self, pixels: Tensor, title: str) -> None:
        self.pixels, self.title = pixels, title

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.pixels)

    def name(self, row: int) -> str:
        """Return the number of an image."""
        return f"image {row} of {self.title}"

    def image(self, row: int, *, channels: int = 3) -> Image.Image:
        """Return an image."""
        image = Image.fromarray(self.pixels[row].expand(3, -1, -1).permute(1, 2, 0).numpy())
        return image if channels == 3 else image.convert("L")

    def decode(self, rows: Tensor, size: tuple[int, int], *, channels: int) -> Tensor:
        """Return images in their own size; without a second copy if it is all of them."""
        pixels = self.pixels if len(rows) == len(self) else self.pixels[rows]
        return to_grey(pixels) if channels < pixels.shape[1] else pixels

    def fingerprint(self) -> str:
        """Return the SHA-256 of the pixels."""
        return fingerprint(self.pixels)


# Fashion-MNIST.


def open_fashion_mnist(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``train-*`` or ``t10k-*`` idx files, compressed or not."""
    start = {"train": "train", "test": "t10k"}[split]
    images = _read_idx(_find_idx(path, f"{start}-images-idx3-ubyte"), 3)
    labels = _read_idx(_find_idx(path, f"{start}-labels-idx1-ubyte"), 1)
    if len(images) != len(labels):
        raise ConfigError(f"{path} holds {len(images)} images but {len(labels)} labels of the split {split!r}.")
    return Split(
        source=MemoryImages(images.unsqueeze(1), f"the split {split!r} in {path}"),
        targets=labels.long(),
        class_names=_FASHION_NAMES,
        layout="idx",
        image_size=(images.shape[1], images.shape[2]),
    )


def _find_idx(path: Path, name: str) -> Path:
    expected = "the folder of train-images-idx3-ubyte, train-labels-idx1-ubyte and the t10k files, with .gz or without"
    check_folder(path, expected)
    dotted = name.replace("-idx", ".idx")  # some copies have a dot before the number of dimensions
    for place in (path, path / "FashionMNIST" / "raw", path / "raw"):
        for file in (name, f"{name}.gz", dotted, f"{dotted}.gz"):
            if (place / file).is_file():
                return place / file
    raise wrong_place(path, f"has no {name} or {name}.gz", expected)


def _read_idx(path: Path, dims: int) -> Tensor:
    """Return the unsigned bytes of an idx file, compressed or not, which must have `dims` dimensions."""
    expected = bytes([0, 0, 8, dims])
    with path.open("rb") as raw:
        is_packed = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            header = file.read(4 + 4 * dims)
            if len(header) < 4 + 4 * dims or not header.startswith(expected):
                raise ValueError(f"{dims} dimensions of bytes begin with {expected.hex()}, not {header[:4].hex()}")
            shape = np.frombuffer(header, dtype=">u4", offset=4).tolist()
            size = math.prod(shape)
            if size > _LARGEST:
                raise ValueError(f"{shape} values are stated, more than any such file has")
            data = read_pieces(file, size + 1)  # what the header does not announce is not unpacked
        if len(data) != size:
            raise ValueError(f"{shape} values are stated, but it holds {'more' if len(data) > size else len(data)}")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path} is no idx file, or damaged or incomplete: {error}.") from error
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(shape))


# CIFAR.


def open_cifar(options: ImageOptions, path: Path, split: str) -> Split:
    """Read parquet files as on the hub, or the binary version."""
    classes = options.class_count()
    files, pickles = [f"{split}.bin"], ("meta", "cifar-100-python")
    if classes == 10:
        files = [f"data_batch_{number}.bin" for number in range(1, 6)] if split == "train" else ["test_batch.bin"]
        pickles = ("data_batch_1", "cifar-10-batches-py")
    expected = f"the folder of {split}.parquet (or {split}-*.parquet), or of the binary version ({', '.join(files)})"
    check_folder(path, expected)
    names = CIFAR10_NAMES if classes == 10 else ()
    if shards := find_shards(path, [split]):
        has_fine = classes == 100 and "fine_label" in columns_of(shards[0])
        found = open_shards(shards, label_column="fine_label" if has_fine else None)
        return replace(found, class_names=found.class_names or names, image_size=(32, 32))
    for place in (path, path / f"cifar-{classes}-batches-bin", path / f"cifar-{classes}-binary"):
        present = [place / name for name in files if (place / name).is_file()]
        if present and len(present) < len(files):
            raise ConfigError(f"{place} holds only {len(present)} of {', '.join(files)}; the others are missing.")
        if present:
            pixels, targets = _read_cifar(present, label_bytes=1 if classes == 10 else 2)
            named = place / "fine_label_names.txt"
            return Split(
                source=MemoryImages(pixels, f"the split {split!r} in {place}"),
                targets=targets,
                class_names=names or (tuple(named.read_text("utf-8", "replace").split()) if named.is_file() else ()),
                layout="binary",
                image_size=(32, 32),
            )
    if any((path / name).exists() for name in pickles):
        raise ConfigError(
            f"{path} holds the Python version of CIFAR-{classes}, whose files are pickles: reading them can run any "
            f"program, so they are not read. Use parquet files (hub: uoft-cs/cifar{classes}) or the binary version "
            f"({', '.join(files)}) instead."
        )
    raise wrong_place(path, f"holds no CIFAR-{classes}", expected)


def _read_cifar(paths: Sequence[Path], label_bytes: int) -> tuple[Tensor, Tensor]:
    """Return images and labels of the binary version: records of labels, of which the last counts, and pixels."""
    record = label_bytes + 3 * 32 * 32
    for path in paths:
        size = path.stat().st_size
        if size > _LARGEST:
            raise ConfigError(f"{path} has {size:,} bytes, more than CIFAR ever has; it was not read.")
        if not size or size % record:
            raise ConfigError(
                f"{path} has {size} bytes, which is no whole number of records of {record} bytes; "
                "it is damaged, incomplete, or of another data set."
            )
    records = torch.from_numpy(np.concatenate([np.fromfile(path, dtype=np.uint8) for path in paths]))
    records = records.view(-1, record)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous(), records[:, label_bytes - 1].long()


# Flowers-102 and Oxford-IIIT Pets, in the splits in which Oxford publishes them.


def open_flowers102(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``setid.mat``, ``imagelabels.mat`` and ``jpg/``; sorted by number, as the official splits have it."""
    import tost._torchvision  # noqa: F401  prepares a CPU build of torch for torchvision

    # isort: split
    from torchvision.datasets import Flowers102  # type: ignore[import-untyped]

    expected = "the folder of jpg/, imagelabels.mat and setid.mat"
    # torchvision makes the sub-folder.
    place = find_folder(path, (path, path / "flowers-102"), ("jpg", "imagelabels.mat", "setid.mat"), expected)
    keys = {"train": ["trnid"], "val": ["valid"], "trainval": ["trnid", "valid"], "test": ["tstid"]}[split]
    labels = _whole_numbers(place / "imagelabels.mat", ["labels"])
    numbers = np.sort(_whole_numbers(place / "setid.mat", keys))
    if len(numbers) and not 1 <= numbers[0] <= numbers[-1] <= len(labels):
        raise ConfigError(
            f"{place / 'setid.mat'} names images {numbers[0]} to {numbers[-1]}, but imagelabels.mat has "
            f"{len(labels)} labels; the two files do not belong together."
        )
    return Split(
        source=_present(place / "jpg", [f"image_{number:05d}.jpg" for number in numbers.tolist()]),
        targets=torch.from_numpy(labels[numbers - 1] - 1),
        class_names=tuple(getattr(Flowers102, "classes", ())),  # older versions do not have them
        layout="official",
    )


def _whole_numbers(path: Path, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        return np.concatenate([np.atleast_1d(np.array(one)) for one in read_matlab(path, names)]).astype(np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path} cannot be read as a MATLAB file with {', '.join(names)}: {error}") from error


_MATLAB = """
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
except ImportError:
    pass
from scipy.io import loadmat, whosmat
path, *names = sys.argv[1:]
if sum(map(len, names)) and any(max(shape, default=0) > 10**6 for name, shape, _ in whosmat(path) if name in names):
    sys.exit("a variable has more than 1,000,000 values")
found = loadmat(path, variable_names=names, simplify_cells=True, appendmat=False)
print(json.dumps([found[name] for name in names], default=lambda value: value.tolist()))
"""


def read_matlab(path: Path, names: Sequence[str]) -> list[Any]:
    """Return variables of a MATLAB file, as JSON has them.

    A damaged file can make SciPy's compiled reader leave its memory and end the program, or fill it. So it runs in a
    process of its own, with limits.

    Raises:
        ConfigError: It is no such file, or a variable is missing.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        command = [sys.executable, "-c", _MATLAB, str(path), *names]
        run = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
        return list(json.loads(run.stdout))
    except (subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else error
        raise ConfigError(f"{path} cannot be read as a MATLAB file with {', '.join(names)}: {reason}") from error


def open_pets(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``annotations/trainval.txt`` or ``test.txt`` and ``images/``, in the order of the list."""
    needed = ("images", f"annotations/{split}.txt")
    place = find_folder(path, (path, path / "oxford-iiit-pet"), needed, "the folder of images/ and annotations/")
    file = place / "annotations" / f"{split}.txt"
    names: list[str] = []
    targets: list[int] = []
    for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) < 2 or not re.fullmatch("[1-9][0-9]{0,3}", words[1]):
            raise ConfigError(
                f"{file}, line {number}: {line.strip()!r} is no entry of an image, such as 'Abyssinian_100 1 1 1'."
            )
        names.append(f"{words[0]}.jpg")
        targets.append(int(words[1]) - 1)
    breeds = {label: name.rpartition("_")[0].replace("_", " ") for label, name in zip(targets, names, strict=True)}
    return Split(
        source=_present(place / "images", names),
        targets=torch.tensor(targets, dtype=torch.int64),
        class_names=tuple(breeds[label] for label in sorted(breeds)),
        layout="official",
    )


def _present(folder: Path, names: Sequence[str]) -> FileImages:
    missing = sorted(set(names) - {entry.name for entry in folder.iterdir()})
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(names)} images of the split, such as {missing[0]}; "
            "the download is not complete."
        )
    return FileImages(folder, names)


# ImageNet-1k as folders or parquet files, and the reassessed labels (ReaL) of its validation images.

_IMAGES = 50_000  # of the validation set
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
_IMAGENET = (
    "a folder with train/<wnid>/<image> and val/<wnid>/<image>, or with parquet files such as train-*.parquet and "
    "validation-*.parquet"
)


@cache
def imagenet_classes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the identifiers (such as ``n01440764``) and the names of the 1000 classes, in the order of the labels."""
    import tost._torchvision  # noqa: F401  prepares a CPU build of torch for torchvision, and so for timm

    # isort: split
    from timm.data.imagenet_info import ImageNetInfo

    info: Any = ImageNetInfo()
    identifiers = tuple(map(str, info.label_names()))
    return identifiers, tuple(info.label_name_to_description(name) for name in identifiers)


def open_imagenet(options: ImageNetOptions, path: Path, split: str) -> Split:
    """Read ImageNet-1k from folders or parquet files; the validation split with ReaL labels on request."""
    check_folder(path, _IMAGENET)
    identifiers, class_names = imagenet_classes()
    if shards := find_shards(path, split_names(split)):
        found = open_shards(shards)
    else:
        folder = next((path / name for name in split_names(split) if (path / name).is_dir()), None)
        if folder is None:
            raise wrong_place(path, f"holds no split {split!r} of ImageNet", _IMAGENET)
        found = open_class_folders(folder)
        labels = {identifier: label for label, identifier in enumerate(identifiers)}
        if unlike := sorted({*found.class_names} ^ {*identifiers}):
            raise ConfigError(
                f"{folder} does not hold the {len(identifiers)} classes of ImageNet-1k: {len(unlike)} are missing or "
                f"unknown, such as {unlike[0]}; for other classes use the data set image_folder."
            )
        found = replace(found, targets=torch.tensor([labels[name] for name in found.class_names])[found.targets])
    found = replace(found, class_names=class_names)
    if options.real_labels is not None and split == options.validation_split:
        return replace(found, extra={"real": real_labels(found.source)})
    return found


def real_labels(source: ImageSource) -> Tensor:
    """Return the reassessed labels of validation images, from the copy that timm holds.

    Args:
        source: The images. Their numbers are in their file names.

    Returns:
        The labels of each image, padded with -1, int64 ``[N, M]``. Images that show none of the classes have none.

    Raises:
        ConfigError: An image is not of the validation set.
    """
    lists = _timm_labels()
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


def _timm_labels() -> list[list[int]]:
    import tost._torchvision  # noqa: F401

    # isort: split
    from timm.data.real_labels import RealLabelsImagenet

    holder: Any = RealLabelsImagenet
    by_name: dict[str, list[int]] = holder([""] * _IMAGES).real_labels
    return [by_name[name] for name in sorted(by_name)]
