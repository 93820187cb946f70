"""What the loop asks of a task: how to build the model, what a batch costs, how sums become metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from tost.data import DataBundle, DataInfo
from tost.models.interface import flops_per_token
from tost.train.config import RunConfig

__all__ = ["Batch", "Outcome", "Report", "Table", "Task"]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """The result of a model on a batch, as sums: they add over micro-batches, processes and evaluation batches.

    Attributes:
        loss: Sum of the loss over the batch's terms (samples or tokens), differentiable.
        sums: Further sums over the batch, for metrics; single numbers.
        counts: Tables of any shape that add likewise, for a detailed report.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, Tensor] = field(default_factory=dict)


class Table(NamedTuple):
    """Part of a report that is shown as a table.

    Attributes:
        title: Line above it.
        headers: Column titles.
        rows: Cells as text.
        labels: Number of columns on the left that hold words; the others hold numbers.
    """

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    labels: int


@dataclass(frozen=True)
class Report:
    """What there is to say about a model beyond its metrics.

    Attributes:
        content: All of it, as plain data for JSON.
        tables: The part that people look at.
    """

    content: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()


class Task(Protocol):
    """One kind of training, such as classification or language modelling."""

    metric: str
    """The validation metric that a recipe of this task is judged by."""

    unit: str = "tok"
    """What `tokens` counts, in short."""

    def build_data(self, config: RunConfig) -> DataBundle:
        """Return the training and validation sets."""
        ...

    def build_model(self, config: RunConfig, bundle: DataBundle) -> nn.Module:
        """Return the model for that data, on the current default device."""
        ...

    def keep(self, config: RunConfig, folder: Path) -> None:
        """Write into the run folder what the model is of no use without; nothing unless a task says otherwise.

        Args:
            config: The run.
            folder: Its folder; only the first process writes.
        """

    def terms(self, batch: Batch) -> int:
        """Return over how many terms the loss of this batch is averaged."""
        ...

    def tokens(self, batch: Batch) -> int:
        """Return how many tokens, or images, the model reads for this batch."""
        ...

    def flops(self, model: nn.Module, batch: Batch) -> float | None:
        """Return the arithmetic of a forward pass over this batch; None if the model does not say."""
        per_token = flops_per_token(model)
        return None if per_token is None else per_token * self.tokens(batch)

    def training_batch(self, batch: Batch, config: RunConfig, seed: int) -> Batch:
        """Return a batch as training sees it; it stays as it is unless a task says otherwise.

        Args:
            batch: Samples, on their device; not to be changed in place.
            config: The run.
            seed: 64 bits for whatever is drawn at random, another number for every batch of the run.
        """
        return batch

    def outcome(self, model: nn.Module, batch: Batch) -> Outcome:
        """Run the model on a batch."""
        ...

    def metrics(self, sums: Mapping[str, float], terms: float) -> dict[str, float]:
        """Turn sums over a validation set, "loss" among them, into metrics."""
        ...

    def report(self, counts: Mapping[str, Tensor], info: DataInfo) -> Report:
        """Turn the tables that were counted over a validation set into a report; empty unless a task says otherwise.

        Args:
            counts: What `outcome` counted, added up over the set.
            info: The data.
        """
        return Report()
