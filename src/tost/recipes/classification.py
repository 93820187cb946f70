"""Classification of sequences: images as pixels, token sequences with padding."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from tost.data import Batch
from tost.train.task import BatchResult, Task, sequence_arguments


class Classification(Task):
    """Cross-entropy over classes; accuracy in [0, 1] on the validation set."""

    metric = "accuracy"

    def compute(self, model: nn.Module, batch: Batch) -> BatchResult:
        """Return the summed cross-entropy and the number of correct samples."""
        logits = model(batch["inputs"], **sequence_arguments(batch))
        loss = F.cross_entropy(logits.float(), batch["targets"], reduction="sum")
        return BatchResult(loss, {"accuracy": (logits.argmax(dim=-1) == batch["targets"]).sum()})
