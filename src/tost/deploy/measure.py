"""Exported models on the data of a run: calibration, and metrics before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.data import DataBundle, Dataset, make_evaluation_loader
from tost.data.dataset import IGNORED, spread
from tost.deploy.runtime import Model
from tost.errors import ConfigError
from tost.train.config import RunConfig
from tost.train.distributed import Distributed
from tost.train.evaluate.metrics import measure
from tost.train.registry import get_task

__all__ = ["Served", "file_batches", "metrics_of", "training_batches"]

BATCH_SIZE = 16


class Served(nn.Module):
    """An exported model with the interface of the model that it was made from.

    Args:
        runner: The exported model.
    """

    def __init__(self, runner: Model) -> None:
        super().__init__()
        self.runner = runner

    def forward(self, x: Tensor, mask: Tensor | None = None, *, targets: Tensor | None = None) -> Tensor:
        """Return logits, or with `targets` the cross-entropy summed over all of them."""
        if self.runner.about["kind"] != "language":
            inputs: dict[str, Any] = {self.runner.about["inputs"][0]["name"]: x.numpy()}
            inputs |= {} if mask is None else {"mask": mask.numpy()}
            return torch.from_numpy(self.runner(**inputs)["logits"])
        if mask is not None:
            raise ConfigError("an exported language model takes no mask; measure it on texts without padding.")
        found, _ = self.runner.advance(x.numpy(), self.runner.start(x.shape[0]), np.arange(x.shape[1]))
        logits = torch.from_numpy(found)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def training_batches(bundle: DataBundle, name: str, samples: int) -> Iterator[Mapping[str, Tensor]]:
    """Return batches of the training set, as inputs of an exported model.

    Args:
        bundle: Data of a run.
        name: Name of the input.
        samples: How many, spread over the set.
    """
    chosen = spread(torch.arange(len(bundle.train)), samples)
    subset = cast(Dataset, torch.utils.data.Subset(bundle.train, chosen.tolist()))
    for batch in make_evaluation_loader(subset, batch_size=BATCH_SIZE):
        yield {name: batch["inputs"], **({"mask": batch["mask"]} if batch.get("mask") is not None else {})}


def file_batches(path: Path, samples: int) -> Iterator[Mapping[str, Any]]:
    """Return batches of the arrays in a file of ``numpy.savez``, whose names are those of the inputs.

    Args:
        path: The file.
        samples: How many rows to take at most.

    Raises:
        ConfigError: It is no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name][:samples] for name in file.files}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read inputs from {path}: {error}; write it with numpy.savez.") from error
    for begin in range(0, min(map(len, arrays.values()), default=0), BATCH_SIZE):
        yield {name: array[begin : begin + BATCH_SIZE] for name, array in arrays.items()}


def metrics_of(model: nn.Module, config: RunConfig, bundle: DataBundle) -> dict[str, float]:
    """Return the metrics of a model on the validation set of a run, computed on the CPU."""
    with Distributed.join(config, device="cpu") as processes:
        return measure(model, get_task(config.recipe), bundle.validation, config, processes).metrics
