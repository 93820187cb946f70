"""Small image data for tests: in memory in the shape of any data set, or on disk as CIFAR-10's binary version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tost.data import DataBundle, DataInfo
from tost.data.dataset import TensorDataset
from tost.train.config import RunConfig

CLASSES = 10


def random_bundle(config: RunConfig, *, train: int = 24, validation: int = 10) -> DataBundle:
    """Noise in the shape that the configured data set states."""
    shape = config.data.shape()
    generator = torch.Generator().manual_seed(0)

    def images(count: int) -> TensorDataset:
        inputs = torch.randn(count, shape.in_chans, *shape.image_size, generator=generator)
        return TensorDataset({"inputs": inputs, "targets": torch.arange(count) % shape.num_classes})

    info = DataInfo(**vars(shape), name=config.data.name, fingerprint="0" * 64)
    return DataBundle(train=images(train), validation=images(validation), info=info)


def write_cifar10(folder: Path, *, train: int = 60, test: int = 30) -> Path:
    """Write images of 32 x 32 pixels whose class is their brightness, in the files of CIFAR-10's binary version."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)

    def records(count: int) -> bytes:
        labels = np.arange(count, dtype=np.uint8)[:, None] % CLASSES
        noise = random.integers(0, 20, (count, 3 * 32 * 32), dtype=np.uint8)
        return np.concatenate((labels, labels * 23 + noise), axis=1).astype(np.uint8).tobytes()

    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(records(train // 5))
    (folder / "test_batch.bin").write_bytes(records(test))
    return folder
