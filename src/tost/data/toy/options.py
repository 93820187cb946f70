"""The small data sets that need no download, and their options. Loads no torch."""

from __future__ import annotations

from pydantic import Field, model_validator

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
    run = "tost.data.toy.digits:write_digits"


class StdlibBytesOptions(DataSetOptions):
    """Options of ``stdlib_bytes``."""

    length: int = Field(default=256, ge=1, description="bytes that the model reads at once; the targets are one later")
    windows: int | None = Field(
        default=None,
        ge=1,
        description="training samples per epoch, windows at random places that are new in every epoch; "
        "null takes as many as fit side by side into the training part",
    )

    def shape(self, path: str | None = None) -> DataShape:
        """Bytes, read `length` at a time."""
        return DataShape(task="language_modeling", input="tokens", length=self.length, vocab_size=256)


class ListOpsOptions(DataSetOptions):
    """Options of ``listops``. Lengths count operators, digits and closing brackets, not parentheses."""

    max_depth: int = Field(
        default=4, ge=2, le=64, description="levels of an expression, the digits at the bottom included"
    )
    max_args: int = Field(default=5, ge=2, description="most arguments of one operator; the fewest are 2")
    min_length: int = Field(default=10, ge=1, description="expressions are longer than this, in tokens")
    max_length: int = Field(
        default=100, ge=5, description="expressions are shorter than this, in tokens; samples are padded to it"
    )
    train_count: int = Field(default=20_000, ge=1, description="training samples")
    validation_count: int = Field(default=2_000, ge=1, description="validation samples; none is in the training set")

    @model_validator(mode="after")
    def _some_expression_fits(self) -> ListOpsOptions:
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

    def shape(self, path: str | None = None) -> DataShape:
        """15 symbols and the padding, 10 values."""
        return DataShape(task="classification", input="tokens", length=self.max_length, vocab_size=16, num_classes=10)


SPECS = (
    DataSpec(
        name="digits",
        task="classification",
        description="handwritten digits of scikit-learn, 8 x 8 grey pixels as a sequence of 64; 10 classes",
        options=DigitsOptions,
        build="tost.data.toy.digits:build_digits",
    ),
    DataSpec(
        name="listops",
        task="classification",
        description="nested list operations drawn from a seeded grammar; the class is the value, 0 to 9",
        options=ListOpsOptions,
        build="tost.data.toy.listops:build_listops",
    ),
    DataSpec(
        name="stdlib_bytes",
        task="language_modeling",
        description="bytes of the Python standard library's own source files, 256 symbols",
        options=StdlibBytesOptions,
        build="tost.data.toy.stdlib_bytes:build_stdlib_bytes",
        tokenizer="tost._tokenizer:ByteTokenizer",
    ),
)
"""The data sets of this folder."""
