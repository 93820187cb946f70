"""The probes and their options. Loads no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tost.data.spec import DataSetOptions, DataShape, DataSpec


class ProbeOptions(DataSetOptions):
    """Options that the probes share."""

    length: int = Field(default=256, ge=4, description="tokens per sample")
    train_count: int = Field(default=20_000, ge=1, description="training samples per epoch, new ones in every epoch")
    validation_count: int = Field(default=1_000, ge=1, description="validation samples")

    def vocab_size(self) -> int:
        """Return the number of different ids, inputs and answers together."""
        raise NotImplementedError

    def needed(self) -> int:
        """Return how long a sample must be at least."""
        return 4

    def training_stages(self) -> list[ProbeOptions]:
        """Return the options of the first epochs of training that differ from these, one for each epoch."""
        return []

    def shape(self, path: str | None = None) -> DataShape:
        """Ids in, an id out at the tokens that ask."""
        return DataShape(task="token_prediction", input="tokens", length=self.length, vocab_size=self.vocab_size())

    @model_validator(mode="after")
    def _fits(self) -> ProbeOptions:
        if self.length < self.needed():
            raise ValueError(
                f"length={self.length} is too short: these options need {self.needed()} tokens; raise length, or ask "
                "for less."
            )
        return self


class RecallOptions(ProbeOptions):
    """Options of ``recall``."""

    pairs: int = Field(default=16, ge=1, description="key-value pairs at the start of a sample, each asked for once")
    num_keys: int = Field(default=128, ge=1, description="different keys; a sample uses each at most once")
    num_values: int = Field(default=128, ge=2, description="different values")
    first_lengths: list[Annotated[int, Field(ge=4)]] = Field(
        default=[],
        description="tokens per sample in the first epochs of training, one length for each, with a quarter as many "
        "pairs at most; shorter ones are learned sooner",
    )

    def training_stages(self) -> list[ProbeOptions]:
        """Return the options with shorter samples."""
        return [
            self.model_copy(update={"length": length, "pairs": min(self.pairs, length // 4)})
            for length in self.first_lengths
        ]

    def vocab_size(self) -> int:
        """A blank, the keys, the values."""
        return 1 + self.num_keys + self.num_values

    def needed(self) -> int:
        """Return the room for pairs and questions."""
        return 3 * self.pairs

    @model_validator(mode="after")
    def _has_keys(self) -> RecallOptions:
        if self.pairs > self.num_keys:
            raise ValueError(
                f"pairs={self.pairs} need as many different keys, but num_keys={self.num_keys}; raise num_keys."
            )
        if max(self.first_lengths, default=0) > self.length:
            raise ValueError(
                f"first_lengths={self.first_lengths} has samples of more than length={self.length} tokens; leave these "
                "out, or raise length."
            )
        return self


class InductionOptions(ProbeOptions):
    """Options of ``induction``."""

    symbols: int = Field(default=64, ge=2, description="different symbols")

    def vocab_size(self) -> int:
        """A mark that asks, and the symbols."""
        return 1 + self.symbols


class SelectiveCopyOptions(ProbeOptions):
    """Options of ``selective_copy``."""

    symbols: int = Field(default=16, ge=2, description="different symbols")
    count: int = Field(default=16, ge=1, description="symbols to copy, scattered among blanks")

    def vocab_size(self) -> int:
        """A blank, a mark that asks, the symbols."""
        return 2 + self.symbols

    def needed(self) -> int:
        """Return the room for symbols and questions."""
        return 2 * self.count


class MostFrequentOptions(InductionOptions):
    """Options of ``most_frequent``."""

    symbols: int = Field(default=16, ge=2, description="different symbols")


class BracketsOptions(ProbeOptions):
    """Options of ``brackets``."""

    max_depth: int = Field(default=15, ge=1, description="most brackets that are open at the same time")

    def vocab_size(self) -> int:
        """The larger of two brackets and the depths from 0 on."""
        return max(2, self.max_depth + 1)


def _probe(name: str, options: type[ProbeOptions], description: str) -> DataSpec:
    return DataSpec(
        name=name,
        task="token_prediction",
        description=description,
        options=options,
        build="tost.data.probes.samples:build_probe",
    )


SPECS = (
    _probe("recall", RecallOptions, "associative recall (MQAR): key-value pairs, then the values of some keys"),
    _probe("induction", InductionOptions, "the symbol that followed a mark, when the mark comes again"),
    _probe("selective_copy", SelectiveCopyOptions, "symbols scattered among blanks, to be copied in order"),
    _probe("most_frequent", MostFrequentOptions, "the symbol that occurred most often"),
    _probe("brackets", BracketsOptions, "how many brackets are open, after every bracket"),
)
"""The data sets of this folder."""
