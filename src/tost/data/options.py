"""The ``data`` part of a configuration, checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails
from pydantic_core.core_schema import ErrorType

from tost._options import Options
from tost._text import did_you_mean
from tost.data.registry import find_data
from tost.data.spec import DataShape, problem
from tost.errors import ConfigError

_KINDS = frozenset(get_args(ErrorType))


class DataOptions(Options):
    """The ``data`` part of a configuration."""

    model_config = ConfigDict(strict=True)

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

    def data_set_options(self) -> BaseModel:
        """Return `options` as an object of the data set's own class."""
        return find_data(self.name).options.model_validate(self.options)

    def shape(self) -> DataShape:
        """Return what a model must fit, without building the data; all None if the data set does not state it."""
        return find_data(self.name).shape_of(self.data_set_options(), self.path)


def _validate(name: str, given: Mapping[str, Any]) -> BaseModel:
    """Check the options of one data set; every problem is reported, unknown names with a suggestion."""
    schema = find_data(name).options
    fields = list(schema.model_fields)
    takes_any = schema.model_config.get("extra") == "allow"
    unknown = [] if takes_any else [key for key in given if key not in fields]
    takes = f"it takes: {', '.join(fields)}" if fields else "it takes none"
    problems: list[InitErrorDetails] = []
    for key in unknown:
        reason = problem(f"unknown option {key!r} of data set {name!r}; {did_you_mean(key, fields)}{takes}.")
        problems.append(InitErrorDetails(type=reason, loc=(key,), input=given[key]))
    try:
        options = schema.model_validate({key: value for key, value in given.items() if key not in unknown})
    except ValidationError as error:
        for found in error.errors(include_url=False):  # in a form that can be raised again, next to others
            kind = found["type"] if found["type"] in _KINDS else problem(found["msg"])
            again = InitErrorDetails(type=kind, loc=found["loc"], input=found["input"], ctx=found.get("ctx", {}))
            problems.append(again)
    if problems:
        raise ValidationError.from_exception_data(schema.__name__, problems)
    return options
