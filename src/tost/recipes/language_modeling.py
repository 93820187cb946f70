"""Next-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from tost.data import DataBundle, build_data
from tost.data.text.vocabulary import save_tokenizer
from tost.data.tokens.reader import tokenizer_of
from tost.models import create_model
from tost.train.config import RunConfig
from tost.train.evaluate.perplexity import Score
from tost.train.task import Batch, Outcome, Task

__all__ = ["LanguageModeling"]


class LanguageModeling(Task):
    """Cross-entropy of the next token in nats; perplexity and bits per token on the validation set as well."""

    metric = "loss"

    def build_data(self, config: RunConfig) -> DataBundle:
        """Return the training and validation sets."""
        return build_data(config.data, config.train.seed)

    def build_model(self, config: RunConfig, bundle: DataBundle) -> nn.Module:
        """Return the configured language model."""
        return create_model(config.model.name, **config.model.options)

    def keep(self, config: RunConfig, folder: Path) -> None:
        """Write the tokenizer: a language model speaks in its ids."""
        save_tokenizer(tokenizer_of(config.data), folder)

    def terms(self, batch: Batch) -> int:
        """Return the number of predicted tokens."""
        return batch["targets"].numel()

    def tokens(self, batch: Batch) -> int:
        """Return the number of tokens read."""
        return batch["inputs"].numel()

    def outcome(self, model: nn.Module, batch: Batch) -> Outcome:
        """Return the summed cross-entropy."""
        return Outcome(model(batch["inputs"], targets=batch["targets"]))

    def metrics(self, sums: Mapping[str, float], terms: float) -> dict[str, float]:
        """Return the mean loss per token in nats and in bits, and the perplexity."""
        found = Score(sums["loss"], int(terms)).metrics()
        del found["tokens"]
        return found
