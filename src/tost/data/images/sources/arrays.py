"""Small data sets in their published files, decoded at once: idx (Fashion-MNIST), CIFAR's binary version, parquet."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost.data.images.decode import read_image
from tost.errors import ConfigError

__all__ = ["Decoded", "decode_images", "read_cifar_binary", "read_idx"]


class Decoded(NamedTuple):
    """Images in memory: pixels uint8 ``[n, 1 or 3, height, width]`` and targets int64 ``[n]``."""

    pixels: Tensor
    targets: Tensor


_IDX_BYTES = 0x08  # the type code of unsigned bytes
_AT_ONCE = 256  # images that a thread decodes before it asks for more
_GZIP = b"\x1f\x8b"


def read_idx(path: Path, dims: int) -> Tensor:
    """Return the content of an idx file of unsigned bytes.

    Args:
        path: The file, compressed with gzip or not, which its content tells.
        dims: Number of dimensions that it must have.

    Returns:
        A uint8 tensor of the shape that the file states.

    Raises:
        ConfigError: The file is something else, or incomplete.
    """
    data = path.read_bytes()
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path} cannot be unpacked, it is damaged or incomplete: {error}.") from error
    start = 4 + 4 * dims
    if len(data) < start or data[:2] != b"\0\0" or data[2] != _IDX_BYTES or data[3] != dims:
        raise ConfigError(
            f"{path} is not an idx file of bytes with {dims} dimensions: it starts with {data[:4].hex()}, "
            f"expected {bytes([0, 0, _IDX_BYTES, dims]).hex()}."
        )
    shape = np.frombuffer(data, dtype=">u4", count=dims, offset=4).astype(np.int64)
    if len(data) != start + int(shape.prod()):
        raise ConfigError(
            f"{path} states {' x '.join(map(str, shape))} values after its header, but holds {len(data) - start}; "
            "it is damaged or incomplete."
        )
    values = np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)
    return torch.from_numpy(values.copy())


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> Decoded:
    """Return images of CIFAR's binary version: records of labels and 3 x 32 x 32 bytes.

    Args:
        paths: The files, in order.
        label_bytes: Labels in front of each image; the last one counts (CIFAR-100: coarse, then fine).

    Raises:
        ConfigError: A file is no whole number of records.
    """
    record = label_bytes + 3 * 32 * 32
    parts = []
    for path in paths:
        data = np.fromfile(path, dtype=np.uint8)
        if not len(data) or len(data) % record:
            raise ConfigError(
                f"{path} has {len(data)} bytes, which is no whole number of records of {record} bytes; "
                "it is damaged, incomplete, or of another data set."
            )
        parts.append(data.reshape(-1, record))
    records = torch.from_numpy(np.concatenate(parts))
    return Decoded(
        records[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous(), records[:, label_bytes - 1].to(torch.int64)
    )


def decode_images(encoded: Sequence[bytes], names: Sequence[str], size: tuple[int, int], *, channels: int) -> Tensor:
    """Decode images of one size into one tensor, uint8 ``[n, channels, height, width]``.

    Args:
        encoded: Contents of image files.
        names: What to call each in messages.
        size: Height and width that each must have.
        channels: 1 or 3.

    Raises:
        BadImageError: An image cannot be read.
        ConfigError: An image has another size.
    """
    pixels = np.empty((len(encoded), *size, channels), dtype=np.uint8)

    def decode(start: int) -> None:
        for place in range(start, min(start + _AT_ONCE, len(encoded))):
            image = read_image(encoded[place], names[place], channels=channels)
            if (image.height, image.width) != size:
                raise ConfigError(
                    f"{names[place]} has {image.height} x {image.width} pixels, but this data set has images of "
                    f"{size[0]} x {size[1]}."
                )
            pixels[place] = np.asarray(image).reshape(*size, channels)

    with ThreadPoolExecutor() as threads:  # decoders let other threads run
        for _ in threads.map(decode, range(0, len(encoded), _AT_ONCE)):
            pass
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
