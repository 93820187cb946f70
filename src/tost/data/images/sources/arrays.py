"""Small data sets in their published files, read into memory: Fashion-MNIST (idx) and CIFAR (binary, or parquet)."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tost._io import read_pieces
from tost.data._tables import columns_of
from tost.data.dataset import fingerprint
from tost.data.images.decode import to_grey
from tost.data.images.options import ImageOptions
from tost.data.images.sources.base import ImageSource, Split, check_folder, entries
from tost.data.images.sources.parquet import find_shards, open_shards
from tost.errors import ConfigError

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_IDX_BYTES = 0x08  # the type code of unsigned bytes
_GZIP = b"\x1f\x8b"
_LARGEST = 1 << 30  # bytes of one file, unpacked
_CIFAR_FILES = {
    10: {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]},
    100: {"train": ["train.bin"], "test": ["test.bin"]},
}
_CIFAR_PICKLES = {10: ("data_batch_1", "cifar-10-batches-py"), 100: ("meta", "cifar-100-python")}


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


def open_fashion_mnist(options: ImageOptions, path: Path, split: str) -> Split:
    """Read ``train-*`` or ``t10k-*`` idx files, compressed or not."""
    expected = "the folder of train-images-idx3-ubyte, train-labels-idx1-ubyte and the t10k files, with .gz or without"
    check_folder(path, expected)
    start = {"train": "train", "test": "t10k"}[split]
    images = _read_idx(_idx_file(path, f"{start}-images-idx3-ubyte", expected), 3)
    labels = _read_idx(_idx_file(path, f"{start}-labels-idx1-ubyte", expected), 1)
    if len(images) != len(labels):
        raise ConfigError(f"{path} holds {len(images)} images but {len(labels)} labels of the split {split!r}.")
    return Split(
        source=MemoryImages(images.unsqueeze(1), f"the split {split!r} in {path}"),
        targets=labels.long(),
        class_names=_FASHION_NAMES,
        layout="idx",
        image_size=(images.shape[1], images.shape[2]),
    )


def _idx_file(path: Path, name: str, expected: str) -> Path:
    dotted = name.replace("-idx", ".idx")  # some copies have a dot before the number of dimensions
    for place in (path, path / "FashionMNIST" / "raw", path / "raw"):
        for file in (name, f"{name}.gz", dotted, f"{dotted}.gz"):
            if (place / file).is_file():
                return place / file
    raise ConfigError(
        f"{path} has no {name} or {name}.gz, it has: {entries(path)}; data.path must point at {expected}."
    )


def _read_idx(path: Path, dims: int) -> Tensor:
    """Return the unsigned bytes of an idx file, compressed or not, which must have `dims` dimensions."""
    expected = bytes([0, 0, _IDX_BYTES, dims])
    with path.open("rb") as raw:
        is_packed = raw.read(2) == _GZIP
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            header = file.read(4 + 4 * dims)
            if len(header) < 4 + 4 * dims or not header.startswith(expected):
                raise ConfigError(
                    f"{path} is not an idx file of bytes with {dims} dimensions: it starts with {header[:4].hex()}, "
                    f"expected {expected.hex()}."
                )
            shape = np.frombuffer(header, dtype=">u4", offset=4).tolist()
            size, stated = math.prod(shape), f"{path} states {' x '.join(map(str, shape))} values after its header"
            if size > _LARGEST:
                raise ConfigError(f"{stated}, more than {_LARGEST:,}, which no such file has; it was not read.")
            data = read_pieces(file, size + 1)  # what the header does not announce is not unpacked
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be unpacked, it is damaged or incomplete: {error}.") from error
    if len(data) != size:
        held = len(data) if len(data) < size else "more"
        raise ConfigError(f"{stated}, but holds {held}; it is damaged or incomplete.")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(shape))


def open_cifar(options: ImageOptions, path: Path, split: str) -> Split:
    """Read parquet files as on the hub, or the binary version."""
    classes = options.class_count()
    files = _CIFAR_FILES[classes][split]
    expected = f"the folder of {split}.parquet (or {split}-*.parquet), or of the binary version ({', '.join(files)})"
    check_folder(path, expected)
    names = CIFAR10_NAMES if classes == 10 else ()
    if shards := find_shards(path, [split]):
        has_fine = classes == 100 and "fine_label" in columns_of(shards[0])
        found = open_shards(shards, label_column="fine_label" if has_fine else None)
        return replace(found, class_names=found.class_names or names, image_size=(32, 32))
    for place in (path, path / f"cifar-{classes}-batches-bin", path / f"cifar-{classes}-binary"):
        present = [place / name for name in files if (place / name).is_file()]
        if len(present) == len(files):
            pixels, targets = _read_cifar(present, label_bytes=1 if classes == 10 else 2)
            named = place / "fine_label_names.txt"
            return Split(
                source=MemoryImages(pixels, f"the split {split!r} in {place}"),
                targets=targets,
                class_names=names or (tuple(named.read_text("utf-8", "replace").split()) if named.is_file() else ()),
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


def _read_cifar(paths: Sequence[Path], label_bytes: int) -> tuple[Tensor, Tensor]:
    """Return images and labels of the binary version: records of labels, of which the last counts, and pixels."""
    record = label_bytes + 3 * 32 * 32
    parts = []
    for path in paths:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes, more than CIFAR ever has; it was not read.")
        data = np.fromfile(path, dtype=np.uint8)
        if not len(data) or len(data) % record:
            raise ConfigError(
                f"{path} has {len(data)} bytes, which is no whole number of records of {record} bytes; "
                "it is damaged, incomplete, or of another data set."
            )
        parts.append(data.reshape(-1, record))
    records = torch.from_numpy(np.concatenate(parts))
    pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous()
    return pixels, records[:, label_bytes - 1].to(torch.int64)
