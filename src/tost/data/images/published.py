"""Data sets in the files in which they are published: Fashion-MNIST, CIFAR, Flowers-102, Oxford-IIIT Pets, ImageNet."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tost._io import read_json, read_pieces
from tost.data._tables import columns_of
from tost.data.dataset import fingerprint
from tost.data.images.options import ImageNetOptions, ImageOptions, split_names
from tost.data.images.sources import (
    FileImages,
    ImageSource,
    Split,
    TarImages,
    check_folder,
    find_folder,
    find_shards,
    image_files,
    index_tar,
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


# ImageNet-1k as folders, tar files or parquet files, and the reassessed labels (ReaL) of its validation images.

_IMAGES = 50_000  # of the validation set
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
_IMAGENET = (
    "a folder with train/<wnid>/<image> and val/<wnid>/<image>, with tar files such as ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar, or with parquet files such as train-*.parquet and validation-*.parquet"
)
_DEVKIT = "ILSVRC2012_devkit_t12/data"
_LABEL_FILES = ("LOC_val_solution.csv", "val.txt", f"{_DEVKIT}/ILSVRC2012_validation_ground_truth.txt")


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
    """Read ImageNet-1k from folders, tar or parquet files; the validation split with ReaL labels on request."""
    check_folder(path, _IMAGENET)
    found = replace(_open_imagenet(path, split_names(split), split), class_names=imagenet_classes()[1])
    if options.real_labels is not None and split == options.validation_split:
        return replace(found, extra={"real": real_labels(options.real_labels, found.source)})
    return found


def _open_imagenet(path: Path, names: Sequence[str], split: str) -> Split:
    if shards := find_shards(path, names):
        return open_shards(shards)
    for name in names:
        folder = path / name
        if folder.is_dir() and not any(folder.glob("*.tar")):
            if any(entry.is_dir() for entry in folder.iterdir()):
                found = open_class_folders(folder)
                labels = _numbered(found.class_names, folder)
                return replace(found, targets=torch.tensor([labels[name] for name in found.class_names])[found.targets])
            if not (files := image_files(folder)):
                raise wrong_place(folder, "holds no images", _IMAGENET)
            return Split(source=FileImages(folder, files), targets=targets_of(files, path), layout="folder")
    # Tar files whose names contain the split's as a word, without those of other tasks (_t3).
    is_named = re.compile(rf"(^|[-_./])({'|'.join(names)})([-_.]|$)")
    candidates = [*path.glob("*.tar"), *(file for name in names for file in (path / name).glob("*.tar"))]
    tars = sorted(
        file
        for file in candidates
        if is_named.search(file.relative_to(path).as_posix()) and not re.search(r"_t[0-9]$", file.stem)
    )
    if not tars:
        raise wrong_place(path, f"holds no split {split!r} of ImageNet", _IMAGENET)
    members = index_tar(tars)
    if not members:
        raise ConfigError(f"{', '.join(map(str, tars[:3]))}: no images are in it.")
    folders = sorted({one.folder for one in members})
    if all(one.label is not None for one in members):
        targets = torch.tensor([one.label for one in members])
    elif len(folders) == 1:  # all in one place: not sorted into classes
        targets = targets_of([one.name for one in members], path)
    else:
        labels = _numbered(folders, tars[0])
        targets = torch.tensor([labels[one.folder] for one in members])
    return Split(source=TarImages(tars, members), targets=targets, layout="tar")


def _numbered(found: Sequence[str], place: Path) -> Mapping[str, int]:
    """Return the label of each class identifier; all of them must be there, and no others."""
    identifiers, _ = imagenet_classes()
    unknown, missing = sorted(set(found) - set(identifiers)), sorted(set(identifiers) - set(found))
    if unknown or missing:
        counts = [f"{len(names)} are {what}" + f" (such as {names[0]})" * bool(names) for what, names in
                  (("missing", missing), ("unknown", unknown))]  # fmt: skip
        raise ConfigError(
            f"{place} does not hold the {len(identifiers)} classes of ImageNet-1k: {', '.join(counts)}; for other "
            "classes use the data set image_folder."
        )
    return {identifier: label for label, identifier in enumerate(identifiers)}


def targets_of(names: Sequence[str], path: Path) -> Tensor:
    """Return the labels of images that are not sorted into classes, as the published validation files are."""
    labels = labels_by_image(path)
    stems = [PurePosixPath(name).name.partition(".")[0] for name in names]
    unknown = [stem for stem in stems if stem not in labels]
    if unknown:
        raise ConfigError(f"{len(unknown)} images have no label, such as {unknown[0]}; see the label files in {path}.")
    return torch.tensor([labels[stem] for stem in stems])


def labels_by_image(path: Path) -> Mapping[str, int]:
    """Return the labels of validation images, by file name without ending, from one of the published lists."""
    numbers = {identifier: label for label, identifier in enumerate(imagenet_classes()[0])}
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
        lines = [line.split() for line in file.read_text("utf-8").splitlines() if line.strip()]
        if file.name == "val.txt":
            by_text = {str(label): label for label in numbers.values()}
            return {name.partition(".")[0]: by_text[label] for name, label in lines}
        (synsets,) = read_matlab(file.with_name("meta.mat"), ["synsets"])
        by_number = {int(one["ILSVRC2012_ID"]): numbers.get(str(one["WNID"]), -1) for one in synsets}
        return {f"ILSVRC2012_val_{at:08d}": by_number[int(words[0])] for at, words in enumerate(lines, 1)}
    except (LookupError, ValueError, TypeError, AttributeError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
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
        import tost._torchvision  # noqa: F401

        # isort: split
        from timm.data.real_labels import RealLabelsImagenet

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
