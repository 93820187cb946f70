"""Targets that hold images: single files, tar, parquet, idx and CIFAR's records, and lists of labels."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

from fuzz.harness import Harness, one_file, one_of_many


def image(folder: Path) -> Harness:
    """Single images in any format."""
    import numpy as np
    from PIL import Image

    from tost.data.images.transforms import read_image

    pixels = np.arange(7 * 5 * 4, dtype=np.uint8).reshape(7, 5, 4)
    seeds = []
    for form, mode in (
        *(("PNG", "RGBA"), ("PNG", "L"), ("PNG", "P"), ("PNG", "1"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P")),
        *(("BMP", "RGB"), ("WEBP", "RGBA"), ("TIFF", "RGB"), ("TIFF", "F"), ("PPM", "RGB"), ("ICO", "RGB")),
    ):
        stream = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(stream, form)
        seeds.append(stream.getvalue())

    def parse(data: bytes) -> None:
        for channels in (1, 3):
            read_image(data, "an image", channels=channels)

    return Harness(parse, seeds)


def parquet(folder: Path) -> Harness:
    """Images and labels in parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.data.images.files import write_parquet
    from tost.data.images.sources import BadImageError, open_shards

    pa.set_cpu_count(1)
    write_parquet(folder / "numbers", [0, 1, 2], size=(4, 4), names=("a", "b", "c"), file_names={0: "x.png"})
    pq.write_table(
        pa.table({"img": pa.array([b"x", None]), "label": pa.array(["a", "b"]).dictionary_encode()}), folder / "texts"
    )
    pq.write_table(
        pa.table({"img": pa.array([b"x"] * 3), "label": pa.array([1, 2, 3], pa.uint64())}),
        folder / "plain",
        compression="none",
    )

    def parse(path: Path) -> None:
        split = open_shards([path])
        split.source.fingerprint()
        assert not len(split.targets) or 0 <= int(split.targets.min()) <= int(split.targets.max()) < 2**31
        for row in range(min(4, len(split.source))):
            split.source.file_name(row)
            try:
                split.source.image(row)
            except BadImageError:
                continue

    seeds = [(folder / name).read_bytes() for name in ("numbers", "texts", "plain")]
    return one_file(folder / "train.parquet", parse, seeds)


def idx(folder: Path) -> Harness:
    """Fashion-MNIST's files: images and labels, compressed or not."""
    import numpy as np

    from tests.data.images.files import idx as write_idx
    from tost.data.images.options import FashionMnistOptions
    from tost.data.images.published import open_fashion_mnist

    images, labels = np.zeros((3, 4, 4), dtype=np.uint8), np.arange(3, dtype=np.uint8)
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
    for name, values in zip(names, (images, labels), strict=True):
        (folder / name).write_bytes(write_idx(values))
    options = FashionMnistOptions()

    def parse(_: Path) -> None:
        split = open_fashion_mnist(options, folder, "train")
        for row in range(min(2, len(split.source))):
            split.source.image(row)

    harness = one_of_many(folder, names, parse)
    packed = [seed[:1] + gzip.compress(seed[1:], mtime=0) for seed in harness.seeds]
    return Harness(harness.parse, [*harness.seeds, *packed], prefix=1)


def cifar(folder: Path) -> Harness:
    """CIFAR-100's records and the names of its classes."""
    from tests.data.images.files import write_cifar_binary
    from tost.data.images.options import Cifar100Options
    from tost.data.images.published import open_cifar

    write_cifar_binary(folder, classes=100, count=1)
    options = Cifar100Options()
    return one_of_many(folder, ("train.bin", "fine_label_names.txt"), lambda _: open_cifar(options, folder, "train"))


def labels(folder: Path) -> Harness:
    """The lists of the pets."""
    from tests.data.images.files import write_pets
    from tost.data.images.options import PetsOptions
    from tost.data.images.published import open_pets

    write_pets(folder, breeds=2)
    options = PetsOptions()
    return one_of_many(folder, ["annotations/test.txt"], lambda _: open_pets(options, folder, "test"))
