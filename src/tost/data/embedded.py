"""Options of the data sets that need no files: digits, ListOps, the library's sources, probes. Loads no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tost._options import Options, option
from tost.data.prepare import PrepareOptions
from tost.data.spec import DataSetOptions, DataShape, DataSpec


class DigitsOptions(DataSetOptions):
    """Options of ``digits``: there are none."""

    def shape(self, path: str | None = None) -> DataShape:
        """64 pixels of one value each."""
        return DataShape(task="classification", input="values", length=64, in_features=1, num_classes=10)


class DigitFilesOptions(PrepareOptions):
    """Options of ``digits`` for `tost data prepare`: there are none."""

    name = "digits"
    summary = "handwritten digits of scikit-learn as a folder of images"
    run = "tost.data.toy:write_digits"


class StdlibBytesOptions(DataSetOptions):
    """Options of ``stdlib_bytes``."""

    length: int = option(256, "bytes that the model reads at once; the targets are one later", ge=1)
    windows: int | None = option(
        None,
        "training samples per epoch, windows at random places that are new in every epoch; "
        "null takes as many as fit side by side into the training part",
        ge=1,
    )

    def shape(self, path: str | None = None) -> DataShape:
        """Bytes, read `length` at a time."""
        return DataShape(task="language_modeling", input="tokens", length=self.length, vocab_size=256)


class ListOpsLimits(Options):
    """Limits of ListOps expressions. Lengths count operators, digits and closing brackets, not parentheses."""

    max_depth: int = option(4, "levels of an expression, the digits included", ge=2, le=64)
    max_args: int = option(5, "most arguments of one operator; the fewest are 2", ge=2)
    min_length: int = option(10, "expressions are longer than this, in tokens", ge=1)
    max_length: int = option(100, "expressions are shorter than this, in tokens; samples are padded to it", ge=5)

    @model_validator(mode="after")
    def _some_expression_fits(self) -> ListOpsLimits:
        longest = 1
        for _ in range(self.max_depth - 1):
            # Only up to what is needed for the comparison: the full number has as many digits as there are levels.
            longest = min(2 + self.max_args * longest, self.max_length)
        if self.min_length + 1 >= self.max_length:
            raise ValueError(
                f"min_length={self.min_length} and max_length={self.max_length} leave no length in between; "
                "raise max_length or lower min_length."
            )
        if longest <= self.min_length:
            raise ValueError(
                f"max_depth={self.max_depth} and max_args={self.max_args} give expressions of at most {longest} "
                f"tokens, but min_length={self.min_length} asks for more; raise max_depth or max_args, "
                "or lower min_length."
            )
        return self


class ListOpsOptions(ListOpsLimits, DataSetOptions):
    """Options of ``listops``."""

    train_count: int = option(20_000, "training samples", ge=1)
    validation_count: int = option(2_000, "validation samples; none is in the training set", ge=1)

    def shape(self, path: str | None = None) -> DataShape:
        """15 symbols and the padding, 10 values."""
        return DataShape(task="classification", input="tokens", length=self.max_length, vocab_size=16, num_classes=10)


class ProbeOptions(DataSetOptions):
    """Options that the probes share."""

    length: int = option(256, "tokens per sample", ge=4)
    train_count: int = option(20_000, "training samples per epoch, new ones in every epoch", ge=1)
    validation_count: int = option(1_000, "validation samples", ge=1)

    def vocab_size(self) -> int:
        """Return the number of different ids, inputs and answers together."""
        raise NotImplementedError

    def needed(self) -> int:
        """Return the least length of a sample."""
        return 4

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

    pairs: int = option(16, "key-value pairs at the start of a sample, each asked for once", ge=1)
    num_keys: int = option(128, "different keys; a sample uses each at most once", ge=1)
    num_values: int = option(128, "different values", ge=2)
    first_lengths: list[Annotated[int, Field(ge=4)]] = option(
        [],
        "tokens per sample in the first epochs of training, one length for each, with a quarter as many "
        "pairs at most; shorter ones are learned sooner",
    )

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

    symbols: int = option(64, "different symbols", ge=2)

    def vocab_size(self) -> int:
        """A mark that asks, and the symbols."""
        return 1 + self.symbols


class SelectiveCopyOptions(ProbeOptions):
    """Options of ``selective_copy``."""

    symbols: int = option(16, "different symbols", ge=2)
    count: int = option(16, "symbols to copy, scattered among blanks", ge=1)

    def vocab_size(self) -> int:
        """A blank, a mark that asks, the symbols."""
        return 2 + self.symbols

    def needed(self) -> int:
        """Return the room for symbols and questions."""
        return 2 * self.count


class MostFrequentOptions(InductionOptions):
    """Options of ``most_frequent``."""

    symbols: int = option(16, "different symbols", ge=2)


class BracketsOptions(ProbeOptions):
    """Options of ``brackets``."""

    max_depth: int = option(15, "most brackets that are open at the same time", ge=1)

    def vocab_size(self) -> int:
        """The larger of two brackets and the depths from 0 on."""
        return max(2, self.max_depth + 1)


PROBES = tuple(
    DataSpec(
        name=name, task="token_prediction", description=text, options=options, build="tost.data.probes:build_probe"
    )
    for name, options, text in (
        ("recall", RecallOptions, "associative recall (MQAR): key-value pairs, then the values of some keys"),
        ("induction", InductionOptions, "the symbol that followed a mark, when the mark comes again"),
        ("selective_copy", SelectiveCopyOptions, "symbols scattered among blanks, to be copied in order"),
        ("most_frequent", MostFrequentOptions, "the symbol that occurred most often"),
        ("brackets", BracketsOptions, "how many brackets are open, after every bracket"),
    )
)
SPECS = (
    DataSpec(
        name="digits",
        task="classification",
        description="handwritten digits of scikit-learn, 8 x 8 grey pixels as a sequence of 64; 10 classes",
        options=DigitsOptions,
        build="tost.data.toy:build_digits",
    ),
    DataSpec(
        name="listops",
        task="classification",
        description="nested list operations drawn from a seeded grammar; the class is the value, 0 to 9",
        options=ListOpsOptions,
        build="tost.data.lra.listops:build_listops",
    ),
    DataSpec(
        name="stdlib_bytes",
        task="language_modeling",
        description="bytes of the Python standard library's own source files, 256 symbols",
        options=StdlibBytesOptions,
        build="tost.data.toy:build_stdlib_bytes",
        tokenizer="tost._tokenizer:ByteTokenizer",
    ),
    *PROBES,
)
"""The embedded data sets."""
