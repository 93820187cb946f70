"""From a configuration to data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from tost.data.dataset import DataBundle
from tost.data.options import DataOptions
from tost.data.registry import find_data
from tost.data.spec import DataInfo
from tost.errors import ConfigError


def build_data(options: DataOptions, seed: int) -> DataBundle:
    """Return the training and the validation set of a configuration.

    Args:
        options: The ``data`` part of a configuration.
        seed: Decides everything that is drawn at random when the data is made. The order of training is decided by
            the seed of the loader.

    Returns:
        Both splits, and what is known about them.

    Raises:
        ConfigError: The options ask for data that cannot be made here, or the function that was registered for it
            returns something else than data.
    """
    spec = find_data(options.name)
    bundle = _bundle(options.name, spec.make(options.data_set_options(), options.path, seed))
    shape = options.shape()
    known = vars(shape) if shape.input is not None else {}
    info = replace(bundle.info, name=options.name, **known)
    if not info.fingerprint:
        # Data that has none of its own is identified by its name and options, and by how much there is.
        counts = [len(bundle.train), len(bundle.validation)]
        content = json.dumps([options.name, options.model_dump(mode="json")["options"], counts], sort_keys=True)
        info = replace(info, fingerprint=hashlib.sha256(content.encode()).hexdigest())
    return replace(bundle, info=info)


def _bundle(name: str, built: Any) -> DataBundle:
    """Return what a builder returned as a bundle, once it is seen to be one."""
    if isinstance(built, DataBundle):
        return built
    if not isinstance(built, tuple | list) or len(built) != 2:
        raise ConfigError(
            f"the function of data set {name!r} returned {type(built).__name__}; it must return a training and a "
            "validation set, as a pair or as a DataBundle."
        )
    for split, dataset in zip(("training", "validation"), built, strict=True):
        is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not is_indexed or isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"the {split} set of data set {name!r} is a {type(dataset).__name__}; it must be a map-style data set, "
                "with __len__ and __getitem__."
            )
        sample = dataset[0] if len(dataset) else {}
        if not isinstance(sample, dict) or not all(isinstance(value, Tensor) for value in sample.values()):
            raise ConfigError(
                f"a sample of the {split} set of data set {name!r} is a {type(sample).__name__}; it must be a "
                'dictionary of tensors, such as {"inputs": ..., "targets": ...}.'
            )
    train, validation = built
    return DataBundle(train=train, validation=validation, info=DataInfo())
