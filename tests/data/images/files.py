"""Small data sets in every format, and what their samples must be.

Image k of class c is one colour: red 20 * c + 10, green 20 * k + 10, blue 100. So a sample tells which image it is,
also after lossy compression and resizing.
"""

from __future__ import annotations

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from scipy.io import savemat

PLAIN = {"mean": [0.0], "std": [1.0]}


def colour(label, number):
    return (20 * (label % 12) + 10, 20 * number + 10, 100)


def picture(label, number, size=(12, 10)):
    return np.full((*size, 3), colour(label, number), dtype=np.uint8)


def encoded(array, form="PNG", **settings):
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, form, **settings)
    return stream.getvalue()


def jpeg(label, number, size=(12, 10)):
    return encoded(picture(label, number, size), "JPEG", quality=95)


def recognize(inputs):
    """Red and green of images that were normalized with `PLAIN`, as (label mod 12, number)."""
    means = inputs.mean(dim=(-2, -1)) * 255
    return [tuple(((channel - 10) / 20).round().int().tolist()) for channel in means[:, :2]]


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_folder(root, *, splits=("train", "val"), classes=("ant", "bee", "cat"), each=3):
    for split in splits:
        for label, name in enumerate(classes):
            for number in range(each):
                write(root / split / name / f"{name}_{number}.jpg", jpeg(label, number))
    return root


def idx(values, packed=False):
    data = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes() + values.tobytes()
    return gzip.compress(data) if packed else data


def write_fashion_mnist(root, *, packed=True, count=12):
    end = ".gz" if packed else ""
    for name, shift in (("train", 0), ("t10k", 1)):
        labels = ((np.arange(count) + shift) % 10).astype(np.uint8)
        images = np.broadcast_to((labels * 20)[:, None, None], (count, 28, 28)).copy()
        write(root / f"{name}-images-idx3-ubyte{end}", idx(images, packed))
        write(root / f"{name}-labels-idx1-ubyte{end}", idx(labels, packed))
    return root


def cifar_records(labels, *, coarse=False):
    records = []
    for number, label in enumerate(labels):
        pixels = picture(label, number % 10, (32, 32)).transpose(2, 0, 1)
        records.append(bytes([label // 5, label] if coarse else [label]) + pixels.tobytes())
    return b"".join(records)


def write_cifar_binary(root, *, classes=10, count=4):
    if classes == 100:
        for name in ("train", "test"):
            write(root / f"{name}.bin", cifar_records([(7 * at) % 100 for at in range(count)], coarse=True))
        write(root / "fine_label_names.txt", "\n".join(f"thing{at}" for at in range(100)).encode())
        return root
    for name in [*(f"data_batch_{at}" for at in range(1, 6)), "test_batch"]:
        write(root / f"{name}.bin", cifar_records([at % 10 for at in range(count)]))
    return root


def write_parquet(path, labels, *, columns=("image", "label"), form="PNG", size=(32, 32), names=None, file_names=None):
    images = [
        {"bytes": encoded(picture(at, number % 10, size), form, lossless=True), "path": (file_names or {}).get(number)}
        for number, at in enumerate(labels)
    ]
    table = pa.table({columns[0]: pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))})
    table = table.append_column(columns[1], pa.array(labels))
    if names:
        features = {columns[0]: {"_type": "Image"}, columns[1]: {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=3)
    return path


def write_flowers102(root, *, count=24):
    labels = (np.arange(count) * 5) % 102 + 1
    order = np.random.default_rng(0).permutation(count) + 1
    thirds = {"trnid": order[:6], "valid": order[6:12], "tstid": order[12:]}
    root.mkdir(parents=True, exist_ok=True)
    savemat(root / "imagelabels.mat", {"labels": labels.astype(np.uint8)})
    savemat(root / "setid.mat", {key: value.astype(np.uint16) for key, value in thirds.items()})
    for number in range(1, count + 1):
        write(root / "jpg" / f"image_{number:05d}.jpg", jpeg(labels[number - 1] - 1, number % 10))
    return root, labels, thirds


def write_pets(root, *, breeds=37):
    for split, number in (("trainval", 1), ("test", 2)):
        lines = ["#Image CLASS-ID SPECIES BREED ID"]
        for label in range(breeds):
            name = f"{'Big_' if label % 2 else ''}breed{label}_{number}"
            write(root / "images" / f"{name}.jpg", jpeg(label, number))
            lines.append(f"{name} {label + 1} {1 + label % 2} {label + 1}")
        write(root / "annotations" / f"{split}.txt", "\n".join(lines).encode() + b"\n")
    return root
