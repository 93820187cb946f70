"""What the loop asks of a task: how to build the model, what a batch costs, how sums become metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from tost.data import DataBundle
from tost.train.config import RunConfig

__all__ = ["Batch", "Outcome", "Task"]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """The result of a model on a batch, as sums: they add over micro-batches, processes and evaluation batches.

    Attributes:
        loss: Sum of the loss over the batch's terms (samples or tokens), differentiable.
        sums: Further sums over the batch, for metrics.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class Task(Protocol):
    """One kind of training, such as classification or language modelling."""

    metric: str
    """The validation metric that a recipe of this task is judged by."""

    def build_data(self, config: RunConfig) -> DataBundle:
        """Return the training and validation sets."""
        ...

    def build_model(self, config: RunConfig, bundle: DataBundle) -> nn.Module:
        """Return the model for that data, on the current default device."""
        ...

    def terms(self, batch: Batch) -> int:
        """Return over how many terms the loss of this batch is averaged."""
        ...

    def tokens(self, batch: Batch) -> int:
        """Return how many tokens the model reads for this batch."""
        ...

    def outcome(self, model: nn.Module, batch: Batch) -> Outcome:
        """Run the model on a batch."""
        ...

    def metrics(self, sums: Mapping[str, float], terms: float) -> dict[str, float]:
        """Turn sums over a validation set, "loss" among them, into metrics."""
        ...
