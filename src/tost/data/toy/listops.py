"""Small ListOps, generated in memory: nested operations on digits, whose value is the class.

The grammar is in `tost.data.lra.grammar`, which also writes the files of the full task.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tost.data.dataset import DataBundle, TensorDataset, fingerprint
from tost.data.lra.grammar import PAD, SPLITS, ListOpsGenerator
from tost.data.spec import DataInfo
from tost.data.toy.options import ListOpsOptions


def build_listops(options: ListOpsOptions, seed: int) -> DataBundle:
    """Return expressions: inputs int64 ``[max_length]``, mask bool of the same shape, targets int64 ``[]``.

    No expression occurs twice, within a split or between them. The validation set does not depend on `train_count`.

    Args:
        options: Limits of the expressions, and how many.
        seed: Decides which are drawn.

    Raises:
        ConfigError: The limits allow too few different expressions.
    """
    generator = ListOpsGenerator(options, seed)
    validation = _rows(*generator.split(SPLITS["val"], options.validation_count))
    train = _rows(*generator.split(SPLITS["train"], options.train_count))
    info = DataInfo(fingerprint=fingerprint(*train.values(), *validation.values()))
    return DataBundle(train=TensorDataset(train), validation=TensorDataset(validation), info=info)


def _rows(ids: NDArray[np.uint8], values: NDArray[np.uint8]) -> dict[str, Tensor]:
    return {"inputs": torch.from_numpy(ids), "targets": torch.from_numpy(values), "mask": torch.from_numpy(ids != PAD)}
