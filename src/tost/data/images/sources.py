"""Where images come from: folders and parquet files. One row is one image.

A source holds names and places, not images, so that it is small enough to be sent to worker processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tost.data._tables import check_columns, columns_of, open_parquet, read_column
from tost.data.dataset import hash_files
from tost.data.images.options import ImageOptions, ImageParquetOptions, class_folders, split_names
from tost.data.images.transforms import BadImageError, read_image
from tost.errors import ConfigError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
_SHOWN = 8
_LARGEST = 1 << 30  # bytes of an image file
_AT_ONCE = 256  # images that a thread decodes before it asks for more


class ImageSource:
    """Images by number."""

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, row: int) -> str:
        """Return what to call an image in messages, such as its path."""
        raise NotImplementedError

    def file_name(self, row: int) -> str:
        """Return the name under which an image was published, if it is known."""
        return self.name(row)

    def read(self, row: int) -> bytes:
        """Return the content of an image's file.

        Raises:
            OSError: It cannot be read.
        """
        raise NotImplementedError

    def image(self, row: int, *, channels: int = 3) -> Image.Image:
        """Return an image, decoded, of mode ``RGB``, or ``L`` if it has one channel.

        Raises:
            BadImageError: It cannot be read.
        """
        try:
            data = self.read(row)
        except OSError as error:
            raise BadImageError(f"{self.name(row)} cannot be opened: {error.strerror or error}") from error
        return read_image(data, self.name(row), channels=channels)

    def decode(self, rows: Tensor, size: tuple[int, int], *, channels: int) -> Tensor:
        """Return images of one size as one tensor, uint8 ``[n, channels, height, width]``.

        Args:
            rows: Which, int64 ``[n]``.
            size: Height and width that each must have.
            channels: 1 or 3.

        Raises:
            BadImageError: An image cannot be read.
            ConfigError: An image has another size.
        """
        pixels = np.empty((len(rows), *size, channels), dtype=np.uint8)

        def decode(start: int) -> None:
            for place, row in enumerate(rows[start : start + _AT_ONCE].tolist(), start):
                image = self.image(row, channels=channels)
                if (image.height, image.width) != size:
                    raise ConfigError(
                        f"{self.name(row)} has {image.height} x {image.width} pixels, but this data set has images of "
                        f"{size[0]} x {size[1]}."
                    )
                pixels[place] = np.asarray(image).reshape(*size, channels)

        with ThreadPoolExecutor() as threads:  # decoders let other threads run
            list(threads.map(decode, range(0, len(rows), _AT_ONCE)))
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def fingerprint(self) -> str:
        """Return a SHA-256 that identifies the images; where they are many, their listing stands for them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split of a data set, before anything is chosen from it.

    Attributes:
        source: The images.
        targets: Their labels, int64 ``[N]``.
        class_names: In the order of the labels; empty if they are not known.
        layout: Kind of files it was read from, such as ``"folder"``.
        image_size: Height and width, if all images have the same by definition.
        extra: Further tensors by row.
    """

    source: ImageSource
    targets: Tensor
    layout: str
    class_names: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


def check_folder(path: Path, expected: str) -> None:
    """Raise `ConfigError` if ``data.path`` is no folder; `expected` is what it should point at."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"data.path {path} {problem}; it must point at {expected}.")


def find_folder(path: Path, places: Iterable[Path], needed: Sequence[str], expected: str) -> Path:
    """Return the first of some places that holds all that is needed.

    Args:
        path: Value of ``data.path``.
        places: Folders to search.
        needed: Names of files and folders.
        expected: What the path should point at, for the message.

    Raises:
        ConfigError: None of them does; the message says what is missing and what is there.
    """
    check_folder(path, expected)
    present = [place for place in places if place.is_dir()]
    for place in present:
        if all((place / name).exists() for name in needed):
            return place
    missing = [name for name in needed if not (present[0] / name).exists()]
    raise wrong_place(present[0], f"has no {' and no '.join(missing)}", expected)


def wrong_place(path: Path, problem: str, expected: str) -> ConfigError:
    """Return the error about a folder that holds something else, with its first entries."""
    return ConfigError(f"{path} {problem}, it has: {entries(path)}; data.path must point at {expected}.")


def entries(path: Path) -> str:
    """Return the first entries of a folder, for messages."""
    found = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (", ".join(found[:_SHOWN]) + more) if found else "nothing"


def hash_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text, in hexadecimal."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", errors="surrogateescape") + b"\n")
    return digest.hexdigest()


def _check_size(size: int) -> None:
    if size > _LARGEST:
        raise OSError(f"it has {size:,} bytes; images of more than {_LARGEST:,} are not read")


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _pack(names: Sequence[str]) -> NDArray[np.bytes_]:
    """Return names as one array: a million strings would be copied into every worker as soon as they are counted."""
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


# Folders.


class FileImages(ImageSource):
    """Files below a folder.

    Args:
        root: The folder.
        names: Paths below it, with ``/``.
    """

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self._names = root, _pack(names)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._names)

    def name(self, row: int) -> str:
        """Return the path of a file."""
        return os.fspath(self.root / os.fsdecode(self._names[row]))

    def read(self, row: int) -> bytes:
        """Return the content of a file."""
        with Path(self.name(row)).open("rb") as file:
            _check_size(os.fstat(file.fileno()).st_size)
            return file.read()

    def fingerprint(self) -> str:
        """Return the SHA-256 of the listing, paths below the folder and sizes, and of pieces of the content."""
        names = list(map(os.fsdecode, self._names))
        listing = hash_lines(f"{name}\t{self._size(name)}" for name in names)
        return hash_lines([listing, hash_files([self.root / name for name in names])])

    def _size(self, name: str) -> int:
        try:
            return (self.root / name).stat().st_size
        except OSError:
            return -1  # such as a link to nowhere, a bad image like others


def image_files(folder: Path) -> list[str]:
    """Return the image files below a folder at any depth, sorted, as paths below it; hidden ones are left out.

    The folder and files may be links. Links to folders inside are not followed: they can lead back.
    """
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder)
        found += [(inside / name).as_posix() for name in files if _is_image(name)]
    return sorted(found)


def open_image_folder(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``<split>/<class>/<image>``."""
    check_folder(path, "the folder that holds <split>/<class>/<image>")
    # Without a validation set of its own, the test set stands in.
    for name in (*split_names(split), *(["test"] if split == "val" else [])):
        if (path / name).is_dir():
            return open_class_folders(path / name)
    raise no_split(path, split)


def no_split(path: Path, split: str) -> ConfigError:
    """Return the error about a folder without a split, with all that is needed where it holds classes or splits."""
    folders = [path / name for name in class_folders(path)]
    hint = ", or name the splits with data.options.train_split and validation_split; hold_out=N needs no second one."
    if guesses := [place for place in (path.parent, path.parent.parent, *folders) if (place / split).is_dir()]:
        hint = f"; did you mean {guesses[0]}?"
    elif any(_is_image(entry.name) for entry in path.iterdir()):
        hint = "; this one holds images itself."
    elif any(_is_image(entry.name) for folder in folders for entry in folder.iterdir()):
        count = sum(len(image_files(folder)) for folder in folders)
        hint = (
            f". These seem to be {len(folders)} classes without splits; to validate on a tenth of them, add "
            f"data.options.train_split=. data.options.hold_out={max(1, count // 10)} "
            f"data.options.num_classes={len(folders)}"
        )
    return ConfigError(
        f"{path} has no folder {split!r}, it has: {entries(path)}; data.path must point at the folder that holds "
        f"<split>/<class>/<image>{hint}"
    )


def open_class_folders(folder: Path) -> Split:
    """Read ``<class>/<image>``; the classes are numbered in sorted order.

    Raises:
        ConfigError: There are no classes, or one has no images.
    """
    classes = class_folders(folder)
    if not classes:
        raise ConfigError(f"{folder} has no folder per class, it has: {entries(folder)}.")
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


# Parquet files, as on the Hugging Face hub: a column of encoded images and one of labels.

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "target")
# Encoded images up to this size together are held in memory; more are mapped from a copy that can be read at any place.
_IN_MEMORY = 1 << 30
_MOST_PACKED = 100  # times that files may unpack to their size: encoded images hardly shrink
_HIGHEST = 1 << 31  # label
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")


def find_shards(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the parquet files of a split, sorted: ``<split>.parquet``, ``<split>-*.parquet`` or ``<split>/*.parquet``.

    Args:
        folder: Folder to search, with its sub-folders ``data`` and ``plain_text``, usual on the hub.
        names: Names that the split may have.

    Raises:
        ConfigError: Some of the files that belong together are missing.
    """
    patterns = [f"{name}{end}" for name in names for end in (".parquet", "-*.parquet", "/*.parquet")]
    places = (folder, folder / "data", folder / "plain_text")
    found = next(filter(None, (sorted(place.glob(pattern)) for place in places for pattern in patterns)), [])
    numbers = [number for path in found if (number := _SHARD.search(path.name))]
    count = int(numbers[0][2]) if numbers else 0
    if missing := sorted(set(range(count)) - {int(number[1]) for number in numbers}):
        raise ConfigError(
            f"{found[0].parent} holds {len(found)} of {count} parquet files of a split; missing are the numbers "
            f"{', '.join(map(str, missing[:10]))}{' and more' if len(missing) > 10 else ''}."
        )
    return found


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
        shards = find_shards(path, split_names(split))
        if not shards:
            remedy = f"{expected}, or name the splits with data.options.train_split and validation_split"
            raise wrong_place(path, f"has no parquet files of the split {split!r}", remedy)
    return open_shards(shards, image_column=options.image_column, label_column=options.label_column)


def open_shards(paths: Sequence[Path], *, image_column: str | None = None, label_column: str | None = None) -> Split:
    """Return the images and labels of parquet files.

    Labels are whole numbers; texts are numbered in sorted order. Names of classes are read from the files' metadata.

    Args:
        paths: The files, in order.
        image_column: Column of encoded images, or of structures with their ``bytes``; None tries the usual names.
        label_column: Column of labels; None tries the usual names.

    Raises:
        ConfigError: A file is damaged or lacks a column.
    """
    with open_parquet(paths[0]) as file:
        schema = file.schema_arrow
    columns = []
    for given, usual, key in ((image_column, _IMAGE_COLUMNS, "image"), (label_column, _LABEL_COLUMNS, "label")):
        wanted = (given,) if given else usual
        found = next((name for name in wanted if name in schema.names), None)
        if found is None:
            raise ConfigError(
                f"{paths[0]} has no column {' or '.join(map(repr, wanted))}, its columns are: "
                f"{', '.join(schema.names)}; name it with data.options.{key}_column."
            )
        columns.append(found)
    image, label = columns
    for path in paths:
        check_columns((image, label), columns_of(path), path)
    targets, names = _labels(read_column(paths, label), label, paths[0])
    source = ParquetImages(paths, image)
    source.load()  # once, here: workers that are forked later share it
    if not names:
        try:
            features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
            names = tuple(map(str, features[label]["names"]))
        except (KeyError, TypeError, ValueError, RecursionError):
            pass  # they are not known
    return Split(source=source, targets=targets, class_names=names, layout="parquet")


def _labels(values: Any, column: str, path: Path) -> tuple[Tensor, tuple[str, ...]]:
    import pyarrow as pa  # type: ignore[import-untyped]

    if values.null_count:
        raise ConfigError(f"column {column!r} of {path} has {values.null_count} empty labels; every image needs one.")
    names: tuple[str, ...] = ()
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        known, numbers = np.unique(np.array(values.to_pylist(), dtype=object).astype(str), return_inverse=True)
        names = tuple(map(str, known))
    elif pa.types.is_integer(values.type):
        numbers = values.to_numpy()
        low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
        if low < 0 or high > _HIGHEST:
            raise ConfigError(
                f"column {column!r} of {path} has labels from {low} to {high}; classes are numbered 0, 1, 2 and so on."
            )
    else:
        raise ConfigError(f"column {column!r} of {path} holds {values.type}; labels are whole numbers or texts.")
    return torch.from_numpy(numbers.astype(np.int64)), names


class ParquetImages(ImageSource):
    """The column of images of parquet files.

    Random access to a parquet file unpacks a whole group of rows for each image. So up to 1 GiB the encoded images are
    held in memory. For more, `datasets` makes a copy in its cache (``HF_DATASETS_CACHE``) that is mapped into memory.

    Args:
        paths: The files, in order.
        column: Column of images.
    """

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self.paths, self.column = list(paths), column
        groups = [list(_groups(path)) for path in paths]
        self._ends = np.cumsum([sum(group.num_rows for group in one) for one in groups])
        self._unpacked = sum(group.total_byte_size for one in groups for group in one)
        self._rows: Any = None
        self._file_names: list[str] | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1])

    def name(self, row: int) -> str:
        """Return the path of the file with the number of the row."""
        file = int(np.searchsorted(self._ends, row, side="right"))
        return f"{self.paths[file]}: row {row - int(self._ends[file - 1] if file else 0)}"

    def file_name(self, row: int) -> str:
        """Return the path that the structure of an image holds beside its bytes; empty if it has none."""
        if self._file_names is None:
            values = read_column(self.paths, f"{self.column}.path").to_pylist() or [None] * len(self)
            self._file_names = [(value or {}).get("path") or "" for value in values]
        return self._file_names[row]

    def read(self, row: int) -> bytes:
        """Return the encoded image of a row."""
        self.load()
        value = self._rows[row]
        value = value[self.column] if isinstance(value, dict) else value.as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise OSError("it holds no image: the column has neither bytes nor structures with a field 'bytes'")
        return data

    def fingerprint(self) -> str:
        """Return the SHA-256 of names, of the sizes of all groups of rows, and of pieces of the content."""
        listing = hash_lines(
            f"{path.name}\t" + " ".join(f"{group.num_rows}:{group.total_byte_size}" for group in _groups(path))
            for path in self.paths
        )
        return hash_lines([listing, hash_files(self.paths)])

    def load(self) -> None:
        """Make the rows readable, if they are not yet.

        Raises:
            ConfigError: They unpack to more than encoded images do.
        """
        packed = sum(path.stat().st_size for path in self.paths)
        if self._rows is not None:
            return
        if max(packed, self._unpacked) <= _IN_MEMORY:
            self._rows = read_column(self.paths, self.column)
            return
        if self._unpacked > _MOST_PACKED * packed:
            raise ConfigError(
                f"{self.paths[0].parent}: parquet files of {packed:,} bytes state to unpack to {self._unpacked:,}, "
                "which encoded images do not; they are damaged, or made to fill the disk."
            )
        import datasets

        files = [str(path) for path in self.paths]
        loaded = datasets.load_dataset("parquet", data_files=files, split="train", columns=[self.column])
        if isinstance(loaded.features[self.column], datasets.Image):
            loaded = loaded.cast_column(self.column, datasets.Image(decode=False))
        self._rows = loaded

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is not forked loads the rows again, which is faster than receiving them through a pipe.
        return self.__dict__ | {"_rows": None, "_file_names": None}


def _groups(path: Path) -> Iterator[Any]:
    """Yield the metadata of the groups of rows."""
    with open_parquet(path) as file:
        for index in range(file.metadata.num_row_groups):
            yield file.metadata.row_group(index)
