"""Answers at some tokens of a sequence, from what came before: the task of the probes."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from tost.data import Batch
from tost.data.dataset import IGNORED
from tost.recipes.language_modeling import LanguageModeling
from tost.train.task import BatchResult, Task


class TokenPrediction(LanguageModeling):
    """Cross-entropy at the tokens that ask; accuracy in [0, 1] over these tokens on the validation set."""

    metric = "accuracy"

    def terms(self, batch: Batch) -> Tensor:
        """Return the number of answers."""
        return (batch["targets"] != IGNORED).sum()

    def compute(self, model: nn.Module, batch: Batch) -> BatchResult:
        """Return the summed cross-entropy and the number of correct answers."""
        logits, targets = model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        return BatchResult(loss, {"accuracy": (logits.argmax(dim=-1) == targets).sum()})

    def metrics(self, sums: Mapping[str, float], terms: float) -> dict[str, float]:
        """Return the mean loss and the accuracy."""
        return Task.metrics(self, sums, terms)
