"""Options of the data sets, checked without torch, and what they say about the shape of the samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails

from tost.data.images.options import IMAGE_OPTIONS
from tost.data.lra.options import LRA_OPTIONS
from tost.data.registry import did_you_mean, find_data
from tost.data.shape import OURS, DataInfo, DataSetOptions, DataShape, problem
from tost.data.tokens.options import TokensOptions
from tost.errors import ConfigError

__all__ = [
    "DataInfo",
    "DataOptions",
    "DataSetOptions",
    "DataShape",
    "DigitsOptions",
    "ListOpsOptions",
    "StdlibBytesOptions",
]


class DigitsOptions(DataSetOptions):
    """Options of ``digits``: there are none."""

    def shape(self) -> DataShape:
        """64 pixels of one value each."""
        return DataShape(task="classification", input="values", length=64, in_features=1, num_classes=10)


class StdlibBytesOptions(DataSetOptions):
    """Options of ``stdlib_bytes``."""

    length: int = Field(default=256, ge=1, description="bytes that the model reads at once; the targets are one later")
    windows: int | None = Field(
        default=None,
        ge=1,
        description="training samples per epoch, each a window at a random place; "
        "null takes as many as fit side by side into the training part",
    )

    def shape(self) -> DataShape:
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
            raise problem(
                f"min_length={self.min_length} and max_length={self.max_length} leave no length in between; "
                "raise max_length or lower min_length."
            )
        if longest <= self.min_length:
            raise problem(
                f"max_depth={self.max_depth} and max_args={self.max_args} give expressions of at most {longest} "
                f"tokens, but min_length={self.min_length} asks for more; raise max_depth or max_args, "
                "or lower min_length."
            )
        return self

    def shape(self) -> DataShape:
        """15 symbols and the padding, 10 values."""
        return DataShape(task="classification", input="tokens", length=self.max_length, vocab_size=16, num_classes=10)


_OPTIONS: dict[str, type[DataSetOptions]] = {
    "digits": DigitsOptions,
    "listops": ListOpsOptions,
    "stdlib_bytes": StdlibBytesOptions,
    "tokens": TokensOptions,
    **IMAGE_OPTIONS,
    **LRA_OPTIONS,
}


class DataOptions(BaseModel):
    """The ``data`` part of a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(description="data set; `tost ls data` shows them")
    path: str | None = Field(
        default=None, validate_default=True, description="folder or file with the data; null for embedded data sets"
    )
    workers: int = Field(
        default=0, ge=0, description="processes that prepare batches ahead; 0 prepares them in the training process"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, validate_default=True, description="options of the data set itself"
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            find_data(name)
        except ConfigError as error:
            raise problem(str(error)) from error
        return name

    @field_validator("path")
    @classmethod
    def _path_if_taken(cls, path: str | None, info: ValidationInfo) -> str | None:
        if "name" not in info.data:  # an unknown name is reported once, by its own check
            return path
        name = info.data["name"]
        if find_data(name).takes_path:
            if path is None:
                raise problem(f"data set {name!r} is read from disk; set data.path to its folder or file.")
        elif path is not None:
            raise problem(f"data set {name!r} reads no files, got path {path!r}; leave data.path out.")
        return path

    @field_validator("options")
    @classmethod
    def _complete(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" not in info.data:
            return options
        return _validate(info.data["name"], options).model_dump()

    def data_set_options(self) -> DataSetOptions:
        """Return `options` as the data set's own class."""
        return _OPTIONS[self.name].model_validate(self.options)

    def shape(self) -> DataShape:
        """Return what a model must fit, without building the data."""
        return self.data_set_options().shape_of(self.path)


def _validate(name: str, given: Mapping[str, Any]) -> DataSetOptions:
    """Check the options of one data set; every problem is reported, unknown names with a suggestion."""
    schema = _OPTIONS[name]
    known = {key: value for key, value in given.items() if key in schema.model_fields}
    problems = [
        InitErrorDetails(type=problem(_unknown(name, key, list(schema.model_fields))), loc=(key,), input=given[key])
        for key in given
        if key not in known
    ]
    try:
        options = schema.model_validate(known)
    except ValidationError as error:
        problems += [_again(found) for found in error.errors(include_url=False)]
    if problems:
        raise ValidationError.from_exception_data(schema.__name__, problems)
    return options


def _again(found: ErrorDetails) -> InitErrorDetails:
    """Return a finding in the form in which it can be raised a second time, next to others."""
    kind = problem(found["msg"]) if found["type"] == OURS else found["type"]
    return InitErrorDetails(type=kind, loc=found["loc"], input=found["input"], ctx=found.get("ctx", {}))


def _unknown(name: str, key: str, fields: list[str]) -> str:
    takes = f"it takes: {', '.join(fields)}" if fields else "it takes none"
    return f"unknown option {key!r} of data set {name!r}; {did_you_mean(key, fields)}{takes}."
