"""Next-token prediction, and answers at some tokens of a sequence: the task of the probes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from tost.data import Batch, DataBundle
from tost.data.dataset import IGNORED
from tost.data.text.tokenizers import save_tokenizer
from tost.data.tokens.reader import tokenizer_of
from tost.errors import ConfigError
from tost.train.config import RunConfig
from tost.train.evaluate.text import Score
from tost.train.task import BatchResult, Task, sequence_arguments


class LanguageModeling(Task):
    """Cross-entropy of the next token in nats; perplexity and bits per token on the validation set as well."""

    chunk: int | None = None
    """Tokens per piece on this process; see `LanguageToST.loss`."""
    truncate: int | None = None
    """Pieces after which gradients are cut off."""

    def build_model(self, config: RunConfig, bundle: DataBundle) -> nn.Module:
        """Return the model that the configuration names, and take its text in pieces of ``train.chunk`` from now on."""
        if config.train.chunk is not None:
            self.chunk, self.truncate = config.train.chunk // config.parallel.context, config.train.truncate
        return super().build_model(config, bundle)

    def save_artifacts(self, config: RunConfig, folder: Path) -> None:
        """Write the tokenizer of the data, whose ids the model is trained on."""
        with suppress(ConfigError):  # data sets of other packages have none
            save_tokenizer(tokenizer_of(config.data), folder)

    def terms(self, batch: Batch) -> int | Tensor:
        """Return the number of predicted tokens."""
        if "segment_ids" not in batch:
            return batch["targets"].numel()
        return (batch["targets"] != IGNORED).sum()

    def compute(self, model: nn.Module, batch: Batch) -> BatchResult:
        """Return the summed cross-entropy."""
        pieces = {} if self.chunk is None else {"chunk": self.chunk, "truncate": self.truncate}
        return BatchResult(model(batch["inputs"], targets=batch["targets"], **sequence_arguments(batch), **pieces))

    def metrics(self, sums: Mapping[str, float], terms: float) -> dict[str, float]:
        """Return the mean loss per token in nats and in bits, and the perplexity."""
        found = Score(sums["loss"], int(terms)).metrics()
        del found["tokens"]
        return found


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
