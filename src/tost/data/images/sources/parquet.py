"""Images in parquet files, as on the Hugging Face hub: a column of encoded images and one of labels."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from torch import Tensor

from tost.data._tables import check_columns, columns_of, open_parquet, read_column
from tost.data.images.options import ImageParquetOptions, split_names
from tost.data.images.sources.base import ImageSource, Split, check_folder, entries, hash_lines
from tost.errors import ConfigError

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "target")
# Encoded images up to this size together are held in memory; more are mapped from a copy that can be read at any place.
_IN_MEMORY = 1 << 30
_HIGHEST = 1 << 31  # label
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")


def find_shards(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the parquet files of a split, sorted: ``<split>.parquet``, ``<split>-*.parquet`` or ``<split>/*.parquet``.

    Args:
        folder: Where to look; its sub-folders ``data`` and ``plain_text``, usual on the hub, are searched as well.
        names: Names that the split may have.

    Raises:
        ConfigError: Some of the files that belong together are missing.
    """
    for place in (folder, folder / "data", folder / "plain_text"):
        for name in names:
            for pattern in (f"{name}.parquet", f"{name}-*.parquet", f"{name}/*.parquet"):
                if found := sorted(place.glob(pattern)):
                    _check_complete(found)
                    return found
    return []


def _check_complete(paths: Sequence[Path]) -> None:
    numbers = [found for path in paths if (found := _SHARD.search(path.name))]
    if not numbers:
        return
    count = int(numbers[0][2])
    missing = sorted(set(range(count)) - {int(found[1]) for found in numbers})
    if missing:
        raise ConfigError(
            f"{paths[0].parent} holds {len(paths)} of {count} parquet files of a split; missing are the numbers "
            f"{', '.join(map(str, missing[:10]))}{' and more' if len(missing) > 10 else ''}."
        )


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
            raise ConfigError(
                f"{path} has no parquet files of the split {split!r}, it has: {entries(path)}; data.path must point at "
                f"{expected}, or name the splits with data.options.train_split and validation_split."
            )
    return open_shards(shards, image_column=options.image_column, label_column=options.label_column)


def open_shards(paths: Sequence[Path], *, image_column: str | None = None, label_column: str | None = None) -> Split:
    """Return the images and labels of parquet files.

    Labels are whole numbers; texts are numbered in sorted order. Names of classes are read from the files' metadata.

    Args:
        paths: The files, in order.
        image_column: Column of encoded images, or of structures with their ``bytes``; None looks for the usual names.
        label_column: Column of labels; None looks for the usual names.

    Raises:
        ConfigError: A file is damaged or lacks a column.
    """
    with open_parquet(paths[0]) as file:
        schema = file.schema_arrow
    image = _column(schema, paths[0], image_column, _IMAGE_COLUMNS, "image_column")
    label = _column(schema, paths[0], label_column, _LABEL_COLUMNS, "label_column")
    for path in paths:
        check_columns((image, label), columns_of(path), path)
    values = read_column(paths, label)
    source = ParquetImages(paths, image)
    source.load()  # once, here: workers that are forked later share it
    targets, names = _labels(values, label, paths[0])
    return Split(
        source=source, targets=targets, class_names=names or _names_in_metadata(schema, label), layout="parquet"
    )


def _column(schema: Any, path: Path, given: str | None, usual: Sequence[str], key: str) -> str:
    wanted = [given] if given else usual
    for name in wanted:
        if name in schema.names:
            return name
    raise ConfigError(
        f"{path} has no column {' or '.join(map(repr, wanted))}, its columns are: {', '.join(schema.names)}; name it "
        f"with data.options.{key}."
    )


def _labels(values: Any, column: str, path: Path) -> tuple[Tensor, tuple[str, ...]]:
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


def _names_in_metadata(schema: Any, label: str) -> tuple[str, ...]:
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()


def _groups(path: Path) -> list[Any]:
    """Return the metadata of the groups of rows."""
    with open_parquet(path) as file:
        return [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]


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
        counts = [sum(group.num_rows for group in _groups(path)) for path in paths]
        self._ends = np.array(list(accumulate(counts)), dtype=np.int64)
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
        value = value.as_py() if isinstance(value, pa.Scalar) else value[self.column]
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise OSError("it holds no image: the column has neither bytes nor structures with a field 'bytes'")
        return data

    def fingerprint(self) -> str:
        """Return the SHA-256 of names, and of the sizes of all groups of rows."""
        lines = []
        for path in self.paths:
            sizes = [f"{group.num_rows}:{group.total_byte_size}" for group in _groups(path)]
            lines.append(f"{path.name}\t" + " ".join(sizes))
        return hash_lines(lines)

    def _unpacked(self) -> int:
        """Return the size that the files state for themselves, all columns together."""
        groups = [group for path in self.paths for group in _groups(path)]
        return sum(group.total_byte_size for group in groups)

    def load(self) -> None:
        """Make the rows readable, if they are not yet."""
        if self._rows is not None:
            return
        if max(sum(path.stat().st_size for path in self.paths), self._unpacked()) <= _IN_MEMORY:
            self._rows = read_column(self.paths, self.column)
            return
        import datasets

        files = [str(path) for path in self.paths]
        loaded = datasets.load_dataset("parquet", data_files=files, split="train", columns=[self.column])
        if isinstance(loaded.features[self.column], datasets.Image):
            loaded = loaded.cast_column(self.column, datasets.Image(decode=False))
        self._rows = loaded

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is not forked loads the rows again, which is faster than receiving them through a pipe.
        return self.__dict__ | {"_rows": None, "_file_names": None}
