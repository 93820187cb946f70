"""Handwritten digits that come with scikit-learn, 8 x 8 pixels: as sequences of 64 grey values, or as a folder."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tost._io import atomic_path
from tost.data.dataset import DataBundle, TensorDataset, fingerprint
from tost.data.prepare import Report
from tost.data.spec import DataInfo
from tost.data.toy.options import DigitFilesOptions, DigitsOptions
from tost.errors import ConfigError

_EVERY = 5
_BRIGHTEST = 16.0


def build_digits(options: DigitsOptions) -> DataBundle:
    """Return the digits: inputs float32 ``[64, 1]`` in [0, 1], row after row; targets int64 ``[]``.

    The split, 1,437 images for training and 360 for validation, is fixed and stratified by class.

    Args:
        options: No option exists.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        images, labels, is_validation = _load()
    except ImportError as error:
        raise ConfigError(
            "data set 'digits' is read from scikit-learn, which is not installed; "
            "run `pip install 'tost-transformer[train]'` or choose another data.name."
        ) from error
    inputs = torch.from_numpy(images.astype(np.float32)).unsqueeze(-1)  # [n, 64, 1]
    targets = torch.from_numpy(labels.astype(np.int64))
    train, validation = (
        TensorDataset({"inputs": inputs[chosen], "targets": targets[chosen]})
        for chosen in (~is_validation, is_validation)
    )
    info = DataInfo(fingerprint=fingerprint(*train.rows.values(), *validation.rows.values()))
    return DataBundle(train=train, validation=validation, info=info)


def write_digits(options: DigitFilesOptions, out: Path, *, workers: int, report: Report) -> dict[str, object]:
    """Write ``train/<digit>/<number>.png`` and ``val/<digit>/<number>.png``, 8 x 8 grey pixels each.

    The images and the split are those of the data set ``digits``.

    Args:
        options: No option exists.
        out: Folder to write to; what is there already is written again, with the same bytes.
        workers: Not used: it takes a second.
        report: Receives the progress.

    Returns:
        The numbers of images.

    Raises:
        ConfigError: scikit-learn or Pillow is not installed.
    """
    try:
        from PIL import Image

        images, labels, is_validation = _load()
    except ImportError as error:
        raise ConfigError(
            f"the digits come with scikit-learn and are written by Pillow, but {error.name} is not installed; "
            "run `pip install 'tost-transformer[train,vision]'`."
        ) from error
    grey = np.rint(images.reshape(-1, 8, 8) * 255).astype(np.uint8)
    splits = np.where(is_validation, "val", "train").tolist()
    for number, split in enumerate(splits):
        with atomic_path(out / split / str(labels[number]) / f"{number:04d}.png", sync=False) as draft:
            Image.fromarray(grey[number]).save(draft, format="PNG")
    report(len(grey), len(grey), "images")
    written = Counter(splits)
    return {"train_images": written["train"], "validation_images": written["val"]}


def _load() -> tuple[NDArray[np.float64], NDArray[Any], NDArray[np.bool_]]:
    """Return images ``[n, 64]`` in [0, 1], labels, and which are for validation: every fifth of each class."""
    # Read without importing scikit-learn, which would load SciPy and pandas too: seconds for a small table.
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("scikit-learn is not installed", name="sklearn")
    table = np.loadtxt(Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), delimiter=",")
    images, labels = table[:, :-1], table[:, -1].astype(np.int64)
    is_validation = np.zeros(len(labels), dtype=bool)
    is_validation[np.argsort(labels, kind="stable")[::_EVERY]] = True
    return images / _BRIGHTEST, labels, is_validation
