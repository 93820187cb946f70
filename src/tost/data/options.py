"""The ``data`` part of a configuration, checked without torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator

from tost._options import Options
from tost.data.registry import find_data
from tost.data.spec import DataShape


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
        find_data(name)
        return name

    @field_validator("path")
    @classmethod
    def _path_if_taken(cls, path: str | None, info: ValidationInfo) -> str | None:
        if "name" not in info.data:  # an unknown name is reported once, by its own check
            return path
        name = info.data["name"]
        if find_data(name).takes_path:
            if path is None:
                raise ValueError(f"data set {name!r} is read from disk; set data.path to its folder or file.")
        elif path is not None:
            raise ValueError(f"data set {name!r} reads no files, got path {path!r}; leave data.path out.")
        return path

    @field_validator("options")
    @classmethod
    def _complete(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" not in info.data:
            return options
        schema = find_data(info.data["name"]).options
        if schema.model_config.get("extra", "ignore") == "ignore":  # a typing error must not pass unseen
            schema = create_model(schema.__name__, __base__=schema, __cls_kwargs__={"extra": "forbid"})
        return schema.model_validate(options).model_dump()

    def data_set_options(self) -> BaseModel:
        """Return `options` as an object of the data set's own class."""
        return find_data(self.name).options.model_validate(self.options)

    def shape(self) -> DataShape:
        """Return what a model must fit, without building the data; all None if the data set does not state it."""
        return find_data(self.name).shape_of(self.data_set_options(), self.path)
