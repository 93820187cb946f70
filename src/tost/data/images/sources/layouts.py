"""Where the files of each data set lie: one function per layout, from a path and a split's name to its images."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tost.data.images.options import ImageOptions, ImageParquetOptions
from tost.data.images.sources.arrays import read_cifar_binary, read_idx
from tost.data.images.sources.base import FileImages, MemoryImages, Split
from tost.data.images.sources.parquet import columns_of, find_shards, open_parquet
from tost.errors import ConfigError

__all__ = [
    "check_folder",
    "entries",
    "image_files",
    "open_cifar",
    "open_fashion_mnist",
    "open_image_folder",
    "open_image_parquet",
]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
_SHOWN = 8

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
SYNONYMS = {"val": ("val", "validation", "valid"), "validation": ("validation", "val", "valid")}


def check_folder(path: Path, expected: str) -> None:
    """Refuse a path that is no folder.

    Raises:
        ConfigError: The message says what was expected.
    """
    if not path.exists():
        raise ConfigError(f"data.path {path} does not exist; it must point at {expected}.")
    if not path.is_dir():
        raise ConfigError(f"data.path {path} is a file; it must point at {expected}.")


def entries(path: Path) -> str:
    """Return the first entries of a folder, for messages."""
    found = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (", ".join(found[:_SHOWN]) + more) if found else "nothing"


def image_files(folder: Path) -> list[str]:
    """Return the image files below a folder at any depth, sorted, as paths below it; hidden ones are left out."""
    found = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        found += [f"{prefix}{name}" for name in files if _is_image(name)]
    return sorted(found)


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def open_fashion_mnist(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``train-*`` or ``t10k-*`` idx files, compressed or not."""
    expected = "the folder of train-images-idx3-ubyte, train-labels-idx1-ubyte and the t10k files, with .gz or without"
    check_folder(path, expected)
    start = {"train": "train", "test": "t10k"}[split]
    images = read_idx(_either(path, f"{start}-images-idx3-ubyte", expected), 3)
    labels = read_idx(_either(path, f"{start}-labels-idx1-ubyte", expected), 1)
    if len(images) != len(labels):
        raise ConfigError(f"{path} holds {len(images)} images but {len(labels)} labels of the split {split!r}.")
    size = (int(images.shape[1]), int(images.shape[2]))
    return Split(
        source=MemoryImages(images.unsqueeze(1), f"the split {split!r} in {path}"),
        targets=labels.long(),
        class_names=FASHION_NAMES,
        layout="idx",
        image_size=size,
    )


def _either(path: Path, name: str, expected: str) -> Path:
    # Some copies have a dot before the number of dimensions.
    for place in (path, path / "FashionMNIST" / "raw", path / "raw"):
        for file in (name, f"{name}.gz", name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz"):
            if (place / file).is_file():
                return place / file
    raise ConfigError(
        f"{path} has no {name} or {name}.gz, it has: {entries(path)}; data.path must point at {expected}."
    )


_CIFAR_FILES = {
    10: {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]},
    100: {"train": ["train.bin"], "test": ["test.bin"]},
}
_CIFAR_PICKLES = {10: ("data_batch_1", "cifar-10-batches-py"), 100: ("meta", "cifar-100-python")}


def open_cifar(options: ImageOptions, path: Path, split: str) -> Split:
    """Read parquet files as on the hub, or the binary version."""
    classes = options.class_count()
    files = _CIFAR_FILES[classes][split]
    expected = f"the folder of {split}.parquet (or {split}-*.parquet), or of the binary version ({', '.join(files)})"
    check_folder(path, expected)
    names = CIFAR10_NAMES if classes == 10 else ()
    if shards := find_shards(path, [split]):
        found = open_parquet(shards, label_column=None if classes == 10 else _fine_label(shards[0]))
        return Split(
            source=found.source,
            targets=found.targets,
            class_names=found.class_names or names,
            layout="parquet",
            image_size=(32, 32),
        )
    for place in (path, path / f"cifar-{classes}-batches-bin", path / f"cifar-{classes}-binary"):
        present = [place / name for name in files if (place / name).is_file()]
        if len(present) == len(files):
            decoded = read_cifar_binary(present, label_bytes=1 if classes == 10 else 2)
            return Split(
                source=MemoryImages(decoded.pixels, f"the split {split!r} in {place}"),
                targets=decoded.targets,
                class_names=names or _cifar_names(place),
                layout="binary",
                image_size=(32, 32),
            )
        if present:
            raise ConfigError(f"{place} holds only {len(present)} of {', '.join(files)}; the others are missing.")
    if any((path / name).exists() for name in _CIFAR_PICKLES[classes]):
        raise ConfigError(
            f"{path} holds the Python version of CIFAR-{classes}, whose files are pickles: reading them can run any "
            f"program, so they are not read. Use parquet files (hub: uoft-cs/cifar{classes}) or the binary version "
            f"({', '.join(files)}) instead."
        )
    raise ConfigError(f"{path} holds no CIFAR-{classes}, it has: {entries(path)}; data.path must point at {expected}.")


def _fine_label(shard: Path) -> str | None:
    return "fine_label" if "fine_label" in columns_of(shard) else None


def _cifar_names(place: Path) -> tuple[str, ...]:
    file = place / "fine_label_names.txt"
    return tuple(file.read_text().split()) if file.is_file() else ()


def open_image_parquet(options: ImageParquetOptions, path: Path, split: str) -> Split:
    """Read any parquet files."""
    if path.is_file():
        if not options.hold_out:
            raise ConfigError(
                f"data.path {path} is one file; to validate on a part of it, set data.options.hold_out to a number of "
                "images, or point at a folder with a file for each split."
            )
        shards = [path]
    else:
        expected = f"the folder of {split}.parquet, {split}-*.parquet or {split}/*.parquet"
        check_folder(path, expected)
        shards = find_shards(path, SYNONYMS.get(split, (split,)))
        if not shards:
            raise ConfigError(
                f"{path} has no parquet files of the split {split!r}, it has: {entries(path)}; data.path must point at "
                f"{expected}, or name the splits with data.options.train_split and validation_split."
            )
    return open_parquet(shards, image_column=options.image_column, label_column=options.label_column)


def open_image_folder(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``<split>/<class>/<image>``."""
    check_folder(path, "the folder that holds <split>/<class>/<image>")
    for name in SYNONYMS.get(split, (split,)):
        if (path / name).is_dir():
            return open_class_folders(path / name)
    raise ConfigError(
        f"{path} has no folder {split!r}, it has: {entries(path)}; data.path must point at the folder that holds "
        f"<split>/<class>/<image>{_guess(path, split)}"
    )


def _guess(path: Path, split: str) -> str:
    """Return where the user may have meant to point, as the end of a sentence."""
    for place in (path.parent, path.parent.parent, *(entry for entry in sorted(path.iterdir()) if entry.is_dir())):
        if (place / split).is_dir():
            return f"; did you mean {place}?"
    if any(_is_image(entry.name) for entry in path.iterdir()):
        return "; this one holds images itself."
    return ", or name the splits with data.options.train_split and validation_split."


def open_class_folders(folder: Path) -> Split:
    """Read ``<class>/<image>``; the classes are numbered in sorted order.

    Raises:
        ConfigError: There are no classes, or one has no images.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        hint = (
            "; these images are not sorted into classes"
            if any(_is_image(entry.name) for entry in folder.iterdir())
            else ""
        )
        raise ConfigError(f"{folder} has no folder per class, it has: {entries(folder)}{hint}.")
    names: list[str] = []
    targets: list[int] = []
    for label, name in enumerate(classes):
        files = image_files(folder / name)
        if not files:
            raise ConfigError(
                f"{folder / name} holds no images, it has: {entries(folder / name)}; a class needs at least one file "
                f"that ends in {', '.join(SUFFIXES)}."
            )
        names += [f"{name}/{file}" for file in files]
        targets += [label] * len(files)
    return Split(
        source=FileImages(folder, names), targets=torch.tensor(targets), class_names=tuple(classes), layout="folder"
    )
