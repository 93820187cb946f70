"""Registry of data sets, open to other packages, and the ``data`` part of a configuration. Loads no torch.

tost's own data sets are registered beside their options: in the tuple ``SPECS`` of ``embedded.py`` and of every
``options.py`` below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator

from tost._options import Options, option, options_of_signature
from tost._plugins import Registry
from tost.data.embedded import SPECS as EMBEDDED
from tost.data.images.options import SPECS as IMAGES
from tost.data.lra.options import SPECS as LONG_RANGE_ARENA
from tost.data.spec import DataShape, DataSpec
from tost.data.tokens.options import SPECS as TOKENS
from tost.errors import ConfigError

Builder = TypeVar("Builder", bound=Callable[..., Any])

_SPEC = "__tost_data__"
"""Attribute of a decorated function that holds its spec."""


def register_data(
    name: str,
    *,
    task: str | None = None,
    options: type[BaseModel] | None = None,
    shape: DataShape | Callable[[Any], DataShape] | None = None,
    takes_path: bool = False,
    tokenizer: Callable[..., Any] | None = None,
    description: str = "",
) -> Callable[[Builder], Builder]:
    """Register a function that builds a data set, so that ``data.name`` in a configuration can refer to it.

    The function returns its training and its validation set, as a pair or as a `DataBundle`. Each is a map-style data
    set of torch, with a length, whose samples are dictionaries of tensors. A sample must depend on its number only, not
    on random numbers drawn when it is read; see `Dataset` for sets that augment.

    Args:
        name: Value of ``data.name``.
        task: Task that can train on it, such as ``"classification"``; None for any.
        options: Pydantic class of its options; the function gets the validated object as its first argument. If None,
            the annotated arguments of the function are the options, and it gets them by keyword.
        shape: Shape of the samples, or a function that returns it for given options; the options of the model follow
            from it. If None, the configuration has to give them.
        takes_path: Whether the data is read from ``data.path``, which is then required and passed as ``path``, a text.
        tokenizer: For text, a function that returns its tokenizer (see `tost.data.text.tokenizers`), which is stored
            with every language model that is trained on it; it gets the path if `takes_path`.
        description: One line for ``tost ls data``; by default the first line of the docstring.

    Returns:
        A decorator that returns the function unchanged. If the function has an argument ``seed``, the seed of the run
        is passed to it.

    Raises:
        ConfigError: The name is taken or cannot be a name.

    Example:
        >>> import torch, tost
        >>> from tost.data import DataOptions, DataShape, build_data
        >>> shape = DataShape(input="values", length=8, in_features=1, num_classes=2)
        >>> @tost.register_data("ramps", task="classification", shape=shape)
        ... def ramps(count: int = 100):
        ...     line = torch.linspace(0, 1, 8).unsqueeze(1)
        ...     up, down = ({"inputs": x, "targets": torch.tensor(y)} for x, y in ((line, 1), (1 - line, 0)))
        ...     return [up, down] * count, [up, down]
        >>> len(build_data(DataOptions(name="ramps", options={"count": 50}), seed=0).train)
        100
    """

    def register(function: Builder) -> Builder:
        settings = {"task": task, "shape": shape, "tokenizer": tokenizer, "description": description}
        spec = _spec(name, function, options=options, takes_path=takes_path, **settings)
        DATA_SETS.add(name, spec)
        setattr(function, _SPEC, spec)
        return function

    return register


def list_data(pattern: str = "*") -> list[str]:
    """Return the names of the data sets that match a shell pattern, sorted.

    Args:
        pattern: Such as ``"*bytes"``.
    """
    return DATA_SETS.names(pattern)


def find_data(name: str) -> DataSpec:
    """Return the data set called `name`.

    Args:
        name: A registered name, the name of an entry point in the group ``tost.data``, or ``package.module:function``,
            whose package must be allowed.

    Raises:
        ConfigError: There is none; the message lists those that exist. Or it is code that is not allowed to run.
    """
    return DATA_SETS.get(name)


def _spec(
    name: str, function: Callable[..., Any], *, options: type[BaseModel] | None, takes_path: bool, **settings: Any
) -> DataSpec:
    schema = options or options_of_signature(function, skip=("seed", "path") if takes_path else ("seed",))
    settings["description"] = settings.get("description") or (inspect.getdoc(function) or "").partition("\n")[0]
    return DataSpec(
        name=name, options=schema, build=function, takes_path=takes_path, as_keywords=options is None, **settings
    )


def _adapt(name: str, found: Any) -> DataSpec:
    """Return the spec of an object that was imported by its name; a plain function may take ``path``."""
    if isinstance(spec := getattr(found, _SPEC, found), DataSpec):
        return replace(spec, name=name)
    if not callable(found):
        raise ConfigError(
            f"{name!r} is a {type(found).__name__}, but a data set is a function that returns its two splits."
        )
    return _spec(name, found, options=None, takes_path="path" in inspect.signature(found).parameters)


_BUILT_IN = (*EMBEDDED, *TOKENS, *LONG_RANGE_ARENA, *IMAGES)
DATA_SETS: Registry[DataSpec] = Registry(
    "data set", "tost.data", _adapt, _BUILT_IN, columns=lambda spec: {"recipe": spec.task or "any"}
)


class DataOptions(Options):
    """The ``data`` part of a configuration."""

    model_config = ConfigDict(strict=True)

    name: str = Field(description="data set; `tost ls data` shows them")
    path: str | None = option(None, "folder or file with the data; null for embedded data sets", validate_default=True)
    workers: int = option(0, "processes that prepare batches ahead; 0 prepares them in the training process", ge=0)
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
        """Return the shape of the samples without building the data; all None if the data set does not state it."""
        return find_data(self.name).shape_of(self.data_set_options(), self.path)
