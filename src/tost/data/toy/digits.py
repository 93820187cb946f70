"""Handwritten digits that come with scikit-learn: 1,797 images of 8 x 8 pixels, read as sequences of 64 grey values."""

from __future__ import annotations

import numpy as np
import torch

from tost.data.dataset import DataBundle, TensorDataset, fingerprint
from tost.data.spec import DataInfo
from tost.data.toy.options import DigitsOptions
from tost.errors import ConfigError

__all__ = ["build_digits"]

# Every fifth image of each class, in scikit-learn's order, is for validation.
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
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "data set 'digits' is read from scikit-learn, which is not installed; "
            "run `pip install 'tost[train]'` or choose another data.name."
        ) from error
    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy((images / _BRIGHTEST).astype(np.float32)).unsqueeze(-1)  # [n, 64, 1]
    targets = torch.from_numpy(labels.astype(np.int64))
    by_class = torch.argsort(targets, stable=True)
    is_validation = torch.zeros(len(targets), dtype=torch.bool)
    is_validation[by_class[::_EVERY]] = True
    train, validation = (
        TensorDataset({"inputs": inputs[chosen], "targets": targets[chosen]})
        for chosen in (~is_validation, is_validation)
    )
    info = DataInfo(fingerprint=fingerprint(*train.rows.values(), *validation.rows.values()))
    return DataBundle(train=train, validation=validation, info=info)
