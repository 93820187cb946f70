"""Grey images as sequences of pixels, row after row: CIFAR-10, and Pathfinder as it was released."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tost.data._tables import check_columns
from tost.data.dataset import Batch, DataBundle, Dataset, fingerprint, spread
from tost.data.images.decode import to_grey
from tost.data.images.options import Cifar10Options
from tost.data.images.sources.arrays import CIFAR10_NAMES, open_cifar
from tost.data.images.sources.base import check_folder, hash_lines
from tost.data.images.sources.folders import FileImages, open_image_folder
from tost.data.lra.generate.pathfinder.settings import FOLDERS
from tost.data.lra.options import LraImageOptions, LraPathfinderOptions, PixelOptions
from tost.data.lra.readers.layout import bundle, find_release, shuffled, split_80_10_10
from tost.data.lra.readers.text import HUB, load_hub_split
from tost.errors import ConfigError

_IN_MEMORY = 1 << 29  # bytes of pixels that are kept by default
_AT_ONCE = 2048  # images that are turned grey together
_NUMPY = b"\x93NUMPY"
_FIELDS = 11  # of a line of metadata
_SHOWN = 500  # characters of the name of a folder
_LARGEST = 1 << 26  # bytes of metadata of one folder
_HUB_COLUMNS = ("img", "image")


class PixelSequences(Dataset):
    """Samples: inputs int64 ``[N]`` or float32 ``[N, 1]``, targets int64 ``[]``, and a mask if zeros are masked.

    Args:
        source: The images by row, uint8 ``[n, pixels]``, in memory or on disk.
        rows: Which of them, int64 ``[n]``.
        targets: Labels by row of the source, int64.
        options: How pixels are encoded.
    """

    def __init__(self, source: Tensor | _Files, rows: Tensor, targets: Tensor, options: PixelOptions) -> None:
        self.source, self.rows, self.targets, self.options = source, rows, targets, options

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def gather(self, indices: Tensor) -> Batch:
        """Return images as a batch."""
        rows = self.rows[indices]
        pixels = self.source[rows]
        if self.options.input == "tokens":
            inputs = pixels.long()
        else:
            inputs = pixels.float().div_(255).sub_(self.options.mean).div_(self.options.std).unsqueeze(-1)
        batch = {"inputs": inputs, "targets": self.targets[rows]}
        return batch | {"mask": pixels != 0} if self.options.mask_zero else batch


class _Files:
    """Image files of one size, read on first use, and kept if there is room."""

    def __init__(self, files: FileImages, side: int, *, keep: bool) -> None:
        self.files, self.side, self.keep = files, side, keep
        self._kept: Tensor | None = None
        self._known = torch.zeros(len(files), dtype=torch.bool)

    def __getitem__(self, rows: Tensor) -> Tensor:
        if not self.keep:
            return self._read(rows)
        if self._kept is None:  # memory that is not written to is not used yet
            self._kept = torch.empty(len(self.files), self.side**2, dtype=torch.uint8)
        missing = rows[~self._known[rows]]
        self._kept[missing] = self._read(missing)
        self._known[missing] = True
        return self._kept[rows]

    def _read(self, rows: Tensor) -> Tensor:
        return self.files.decode(rows, (self.side, self.side), channels=1).flatten(1)

    def __getstate__(self) -> dict[str, Any]:
        # A worker reads for itself: the pixels so far would take longer to send than to read.
        return self.__dict__ | {"_kept": None, "_known": torch.zeros_like(self._known)}


def build_lra_image(options: LraImageOptions, path: str) -> DataBundle:
    """Return CIFAR-10 in grey, each image a sequence of 1024 pixels."""
    pixels, targets = _read_cifar(path, "train", options.grey)
    count = len(targets)
    order = torch.arange(count) if options.split == "order" else shuffled(count, options.split_seed)
    held = int(count * options.val_share)
    rows, held_out = order[: count - held], order[count - held :]
    train = PixelSequences(pixels, spread(rows, options.limit), targets, options)
    if options.validation_split == "test":
        pixels, targets = _read_cifar(path, "test", options.grey)
        held_out = torch.arange(len(targets))
    validation = PixelSequences(pixels, spread(held_out, options.limit), targets, options)
    if not len(train) or not len(validation):
        raise ConfigError(f"{path} holds {count} training images, too few to hold out a share of {options.val_share}.")
    parts = [part[split.rows] for split in (train, validation) for part in (split.source, split.targets)]
    return bundle((train, validation), fingerprint(*parts), {}, CIFAR10_NAMES)


def _read_cifar(path: str, split: str, grey: str) -> tuple[Tensor, Tensor]:
    """Return pixels uint8 ``[n, 1024]`` and labels int64 ``[n]``."""
    if path.startswith(HUB):
        colour, targets = _read_hub(path, split)
    else:
        folder = Path(path)
        check_folder(folder, "the folder of CIFAR-10: parquet files, the binary version, or <split>/<class>/<image>")
        is_folder = (folder / split).is_dir() and any(entry.is_dir() for entry in (folder / split).iterdir())
        found = (open_image_folder if is_folder else open_cifar)(Cifar10Options(), folder, split)
        targets = found.targets
        colour = found.source.decode(torch.arange(len(targets)), (32, 32), channels=3)
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < len(CIFAR10_NAMES):
        raise ConfigError(f"the split {split!r} of {path} has labels up to {int(targets.max())}; there are 10 classes.")
    return _to_grey(colour, grey), targets


def _read_hub(path: str, split: str) -> tuple[Tensor, Tensor]:
    loaded = load_hub_split(path, split)
    column = next((name for name in _HUB_COLUMNS if name in loaded.column_names), _HUB_COLUMNS[0])
    check_columns((column, "label"), loaded.column_names, path, f" Images are in {' or '.join(_HUB_COLUMNS)}.")
    images = np.stack([np.asarray(image.convert("RGB")) for image in loaded[column]])
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor(list(loaded["label"]))


def _to_grey(colour: Tensor, weights: str) -> Tensor:
    """Turn uint8 ``[n, 3, height, width]`` into uint8 ``[n, pixels]``, a part at a time: numbers take more room."""
    turn = to_grey if weights == "pillow" else _tensorflow_grey
    return torch.cat([turn(part).flatten(1) for part in torch.split(colour, _AT_ONCE)])


def _tensorflow_grey(colour: Tensor) -> Tensor:
    red, green, blue = colour.double().unbind(1)
    return (0.2989 * red + 0.5870 * green + 0.1140 * blue).round_().to(torch.uint8).unsqueeze(1)


def build_lra_pathfinder(options: LraPathfinderOptions, path: str) -> DataBundle:
    """Return Pathfinder images, each a sequence of its pixels; the target is 1 if one curve joins the discs."""
    level = FOLDERS[options.difficulty]
    root = Path(path)
    is_level = (root / "metadata").is_dir()
    folder = root if is_level else find_release(root, f"pathfinder{options.side}", [level]) / level
    names, labels, empty = _read_metadata(folder)
    files, targets = FileImages(folder, names), torch.tensor(labels)
    count = len(names)
    order = torch.arange(count) if options.split == "order" else shuffled(count, options.split_seed)
    splits = split_80_10_10(order)
    chosen = [spread(splits[split], options.limit) for split in ("train", options.validation_split)]
    if not all(len(rows) for rows in chosen):
        raise ConfigError(f"{folder} holds {count} images, too few to be split into training, validation and testing.")
    keep = options.in_memory if options.in_memory is not None else count * options.side**2 <= _IN_MEMORY
    source = _Files(files, options.side, keep=keep)
    train, validation = (PixelSequences(source, rows, targets, options) for rows in chosen)
    content = hash_lines([files.fingerprint(), fingerprint(targets, *chosen)])
    return bundle((train, validation), content, {"folder": str(folder), "images": count, "empty": empty})


def _read_metadata(folder: Path) -> tuple[list[str], list[int], int]:
    """Return the images below a folder in the order of the metadata, their labels, and how many files are empty."""
    place = folder / "metadata"
    files = sorted((file for file in place.glob("*.npy") if file.stem.isdigit()), key=lambda file: int(file.stem))
    if not files:
        raise ConfigError(f"{place} holds no metadata; files called 0.npy, 1.npy and so on are needed.")
    sizes: dict[str, dict[str, int]] = {}
    names, labels, empty = [], [], 0
    for file in files:
        for number, fields in enumerate(_metadata_rows(file), start=1):
            if len(fields) != _FIELDS:
                raise ConfigError(
                    f"{file}, line {number} has {len(fields)} fields; it must have {_FIELDS}, the folder, the file, a "
                    "number and the label being the first."
                )
            inside, image, _, label = fields[:4]
            if label not in ("0", "1"):
                raise ConfigError(f"{file}, line {number} has the label {label!r}; it must be 0 or 1.")
            if inside not in sizes:
                sizes[inside] = _sizes(folder / inside, file)
            size = sizes[inside].get(image)
            if size is None:
                raise ConfigError(f"{file} names {inside}/{image}, but {folder / inside / image} does not exist.")
            if size == 0:
                empty += 1
                continue
            names.append(f"{inside}/{image}")
            labels.append(int(label))
    return names, labels, empty


def _sizes(folder: Path, metadata: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as found:
            return {entry.name: entry.stat().st_size for entry in found}
    except (OSError, ValueError) as error:  # there is none, its name is longer than any, or holds a zero
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{metadata} names images in {str(folder)[:_SHOWN]}, which is no folder ({reason})."
        ) from error


def _metadata_rows(file: Path) -> list[list[str]]:
    """Read metadata: text in the release, in spite of the name; arrays of texts from the public generator."""
    if file.stat().st_size > _LARGEST:
        raise ConfigError(f"{file} has {file.stat().st_size:,} bytes, more than metadata ever has; it was not read.")
    data = file.read_bytes()
    if not data.startswith(_NUMPY):
        try:
            return [line.split() for line in data.decode("utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is neither text nor an array: {error}.") from error
    try:
        # Mapped, because a header may state any size; that of the file is compared then.
        rows = np.load(file, mmap_mode="r", allow_pickle=False)
        if rows.ndim == 2 and rows.dtype.kind in "US":
            texts = np.ascontiguousarray(rows.astype(str))
            if texts.size and texts.view(np.uint32).max() > sys.maxunicode:
                raise ValueError("it holds characters that do not exist")
            return [list(row) for row in texts.tolist()]
    except Exception as error:  # a damaged header makes numpy's parser fail in many ways
        raise ConfigError(
            f"{file} cannot be read: {error}. An array of objects is a pickle, which can run any program, so it is not "
            "read; save it as an array of texts."
        ) from error
    raise ConfigError(f"{file} holds an array {rows.dtype} {rows.shape}; it must hold rows of texts.")
