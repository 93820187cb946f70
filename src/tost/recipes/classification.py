"""Classification of sequences: images as pixels, token sequences with padding."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import nn

from tost.data import DataBundle, build_data
from tost.models import create_model
from tost.train.config import RunConfig
from tost.train.task import Batch, Outcome, Task

__all__ = ["Classification"]


class Classification(Task):
    """Cross-entropy over classes; accuracy on the validation set."""

    metric = "accuracy"

    def build_data(self, config: RunConfig) -> DataBundle:
        """Return the training and validation sets."""
        return build_data(config.data, config.train.seed)

    def build_model(self, config: RunConfig, bundle: DataBundle) -> nn.Module:
        """Return the configured classifier."""
        return create_model(config.model.name, **config.model.options)

    def terms(self, batch: Batch) -> int:
        """Return the number of samples."""
        return batch["targets"].shape[0]

    def tokens(self, batch: Batch) -> int:
        """Return the number of positions, padding included, as the model computes them all."""
        inputs = batch["inputs"]
        return inputs.numel() // (inputs.shape[-1] if inputs.is_floating_point() else 1)

    def outcome(self, model: nn.Module, batch: Batch) -> Outcome:
        """Return the summed cross-entropy and the number of samples that were right."""
        padding = {"mask": batch["mask"]} if batch.get("mask") is not None else {}
        logits = model(batch["inputs"], **padding)
        loss = F.cross_entropy(logits.float(), batch["targets"], reduction="sum")
        return Outcome(loss, {"correct": (logits.argmax(dim=-1) == batch["targets"]).sum()})

    def metrics(self, sums: Mapping[str, float], terms: float) -> dict[str, float]:
        """Return the mean loss and the accuracy in [0, 1]."""
        return {"loss": sums["loss"] / terms, "accuracy": sums["correct"] / terms}
