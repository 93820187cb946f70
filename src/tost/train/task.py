"""Tasks: what is learned from a batch, and how sums over a validation set become metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tost._text import Table
from tost.data import Batch, DataBundle, DataInfo, build_data
from tost.models import create_model
from tost.models.registry import flops_per_token
from tost.train.config import RunConfig


@dataclass(frozen=True)
class BatchResult:
    """The result of a model on a batch, as sums: they add over micro-batches, processes and evaluation batches.

    Attributes:
        loss: Sum of the loss over the batch's terms (samples or tokens), differentiable.
        sums: Further sums over the batch, for metrics; single numbers.
        counts: Tables of any shape that add likewise, for details.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Details:
    """Results of an evaluation beyond its metrics.

    Attributes:
        content: All of them, as plain data for JSON.
        tables: The part to show.
    """

    content: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()


def sequence_arguments(batch: Batch) -> dict[str, Tensor]:
    """Return the arguments of a model that describe padding or packing of the sequences of a batch."""
    return {key: batch[key] for key in ("mask", "cu_seqlens", "segment_ids") if batch.get(key) is not None}


class Task(ABC):
    """A kind of training, such as classification or language modelling.

    A subclass needs `compute` only. The other methods have defaults for samples with ``"inputs"`` and ``"targets"``.

    Attributes:
        metric: Validation metric that the task is judged by.
        unit: Short name of what `tokens` counts, for throughput.
    """

    metric: str = "loss"
    unit: str = "tok"

    @abstractmethod
    def compute(self, model: nn.Module, batch: Batch) -> BatchResult:
        """Run the model on a batch and return the summed loss; further sums are for metrics.

        Args:
            model: The model, in training or evaluation mode.
            batch: Samples, on the device of the model; in training as `training_batch` returns them.
        """

    def build_data(self, config: RunConfig) -> DataBundle:
        """Return the training and validation sets: those that the configuration names."""
        return build_data(config.data, config.train.seed)

    def build_model(self, config: RunConfig, bundle: DataBundle) -> nn.Module:
        """Return the model for that data, on the current default device: the one that the configuration names."""
        return create_model(config.model.name, **config.model.options)

    def save_artifacts(self, config: RunConfig, folder: Path) -> None:  # noqa: B027 - optional
        """Write artifacts that are needed at inference, such as a tokenizer, into the run folder; none by default.

        Args:
            config: The run.
            folder: Its folder; only the first process writes.
        """

    def terms(self, batch: Batch) -> int | Tensor:
        """Return the number of terms that the loss of this batch is averaged over; by default that of samples.

        What has to be counted stays a tensor on the device of the batch: a number would have to wait for it.
        """
        return batch["targets"].shape[0]

    def tokens(self, batch: Batch) -> int:
        """Return how many tokens the model reads for this batch; by default all positions, padding included.

        Inputs are ids ``[B, ..., N]``, or vectors of numbers ``[B, ..., N, F]``.
        """
        inputs = batch["inputs"]
        return inputs.numel() // (inputs.shape[-1] if inputs.is_floating_point() else 1)

    def flops(self, model: nn.Module, batch: Batch) -> float | None:
        """Return the arithmetic of a forward pass over this batch; None if the model has no ``flops_per_token()``."""
        per_token = flops_per_token(model)
        return None if per_token is None else per_token * self.tokens(batch)

    def training_batch(self, batch: Batch, config: RunConfig, seed: int) -> Batch:
        """Return a batch for training, with augmentation if the task has any; by default the batch itself.

        Args:
            batch: Samples, on their device; not to be changed in place.
            config: The run.
            seed: 64 bits for random choices, another number for every batch of the run.
        """
        return batch

    def metrics(self, sums: Mapping[str, float], terms: float) -> dict[str, float]:
        """Turn sums over a validation set into metrics; by default the mean of each.

        Args:
            sums: ``"loss"`` and the other sums of `compute`.
            terms: Number of terms in the set.
        """
        return {name: value / terms for name, value in sums.items()}

    def details(self, counts: Mapping[str, Tensor], info: DataInfo) -> Details:
        """Turn tables that were counted over a validation set into details; none by default.

        Args:
            counts: Tables of `compute`, added up over the set.
            info: The data.
        """
        return Details()
