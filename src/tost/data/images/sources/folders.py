"""Image files in folders, one folder per class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from tost.data.images.options import ImageOptions, split_names
from tost.data.images.sources.base import (
    SUFFIXES,
    ImageSource,
    Split,
    check_folder,
    check_size,
    entries,
    hash_lines,
    is_image,
    pack_names,
)
from tost.errors import ConfigError


class FileImages(ImageSource):
    """Files below a folder.

    Args:
        root: The folder.
        names: Paths below it, with ``/``.
    """

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self._names = pack_names(names)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._names)

    def name(self, row: int) -> str:
        """Return the path of a file."""
        return os.fspath(self.root / os.fsdecode(self._names[row]))

    def read(self, row: int) -> bytes:
        """Return the content of a file."""
        with Path(self.name(row)).open("rb") as file:
            check_size(os.fstat(file.fileno()).st_size)
            return file.read()

    def fingerprint(self) -> str:
        """Return the SHA-256 of the listing: paths below the folder, and sizes."""
        return hash_lines(f"{name}\t{self._size(name)}" for name in map(os.fsdecode, self._names))

    def _size(self, name: str) -> int:
        try:
            return (self.root / name).stat().st_size
        except OSError:
            return -1  # such as a link to nowhere, a bad image like others


def image_files(folder: Path) -> list[str]:
    """Return the image files below a folder at any depth, sorted, as paths below it; hidden ones are left out.

    Links to folders are followed, and a folder that is reached in several ways is read once.

    Raises:
        ConfigError: A link leads back to a folder that it is in.
    """
    found = []
    seen = {folder.resolve()}
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in sorted(folders) if _is_new(Path(place, name), seen)]
        inside = Path(place).relative_to(folder).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        found += [f"{prefix}{name}" for name in files if is_image(name)]
    return sorted(found)


def _is_new(folder: Path, seen: set[Path]) -> bool:
    """Return whether to read a folder: it is not hidden, and was not seen before."""
    if folder.name.startswith("."):
        return False
    target = folder.resolve()
    if folder.parent.resolve().is_relative_to(target):
        raise ConfigError(f"{folder} links to {target}, which it is in; remove the link.")
    is_new = target not in seen
    seen.add(target)
    return is_new


def open_image_folder(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``<split>/<class>/<image>``."""
    check_folder(path, "the folder that holds <split>/<class>/<image>")
    # Without a validation set of its own, the test set is the one to look at.
    for name in (*split_names(split), *(["test"] if split == "val" else [])):
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
    if _holds_images(path):
        return "; this one holds images itself."
    if any(entry.is_dir() and _holds_images(entry) for entry in path.iterdir()):
        return (
            ". If these are the classes, without splits, set data.options.train_split=. and data.options.hold_out=N, "
            "how many images to validate on."
        )
    return ", or name the splits with data.options.train_split and validation_split."


def _holds_images(folder: Path) -> bool:
    return any(is_image(entry.name) for entry in folder.iterdir())


def open_class_folders(folder: Path) -> Split:
    """Read ``<class>/<image>``; the classes are numbered in sorted order.

    Raises:
        ConfigError: There are no classes, or one has no images.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        hint = "; these images are not sorted into classes" if _holds_images(folder) else ""
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
