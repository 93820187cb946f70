"""Specification of a data set: its options, its builder and the shape of its samples. Loads no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tost._lazy import load
from tost._options import Options


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Shape of samples, which a model must fit. None: does not apply, or is not known before the data is built.

    Attributes:
        task: Task of the samples, such as ``"classification"``.
        input: ``"tokens"`` for ids ``[N]``, ``"values"`` for numbers ``[N, F]``, ``"image"`` for
            ``[channels, height, width]``.
        length: N, the number of positions of every sample, padding included.
        vocab_size: Number of different ids.
        in_features: F, numbers per position.
        num_classes: Number of classes.
        in_chans: Channels of an image.
        image_size: Height and width of an image.
        towers: Sequences per sample, each of `length` positions; with 2, samples have an axis of two more: ``[2, N]``.
    """

    task: str | None = None
    input: Literal["tokens", "values", "image"] | None = None
    length: int | None = None
    vocab_size: int | None = None
    in_features: int | None = None
    num_classes: int | None = None
    in_chans: int | None = None
    image_size: tuple[int, int] | None = None
    towers: int = 1

    def model_options(self) -> dict[str, Any]:
        """Return the options that a model takes from its data; none if the shape is not known."""
        size = self.image_size
        # Models of images and of text read one kind of input only.
        is_choice = self.input != "image" and self.task not in ("language_modeling", "token_prediction")
        options = {
            "input": self.input if is_choice else None,
            "vocab_size": self.vocab_size,
            "in_features": self.in_features,
            "num_classes": self.num_classes,
            "max_length": self.length,
            "in_chans": self.in_chans,
            "image_size": size[0] if size and size[0] == size[1] else size,
            "towers": self.towers if self.towers > 1 else None,
        }
        return {key: value for key, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DataInfo(DataShape):
    """Facts about a data set that was built: its shape, and the identity of its content.

    Builders fill in the facts that they find; `build_data` adds the name and the shape.

    Attributes:
        name: Its name in the registry.
        fingerprint: SHA-256 of the content of both splits, in hexadecimal; the same wherever the data is the same.
            Large sets of files are identified by their names, their sizes and an evenly spaced part of their content.
        details: Facts for the record of a run, such as the number of source files.
        class_names: Names of the classes, in the order of the labels; empty if they are not known.
    """

    name: str = ""
    fingerprint: str = ""
    details: Mapping[str, int | str] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()


class DataSetOptions(Options):
    """Base of the options of tost's own data sets, which convert no types."""

    model_config = ConfigDict(strict=True)

    def shape(self, path: str | None = None) -> DataShape:
        """Return the shape of the samples.

        Args:
            path: Where the data is; few data sets have to look at it.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A registered data set.

    Attributes:
        name: Value of ``data.name`` in a configuration.
        task: Task that trains on it; None for any.
        description: One line for tables.
        options: Class of its options.
        build: Function that returns the data, or ``"module:function"``, which is loaded when it is called.
        takes_path: Whether ``data.path`` must be set, because the data is read from there.
        as_keywords: Pass the options to `build` as keyword arguments, not as one object.
        shape: Shape of the samples, or a function that returns it for given options. None for `DataSetOptions`, which
            have a method for it, and for data whose shape is not known before it is built.
        tokenizer: Function that returns the tokenizer of a text, or ``"module:function"``; it gets the path if
            `takes_path`. None if there is none.
    """

    name: str
    task: str | None = None
    description: str = ""
    options: type[BaseModel]
    build: str | Callable[..., Any]
    takes_path: bool = False
    as_keywords: bool = False
    shape: DataShape | Callable[[Any], DataShape] | None = None
    tokenizer: str | Callable[..., Any] | None = None

    def shape_of(self, options: BaseModel, path: str | None) -> DataShape:
        """Return the shape of the samples; every field is None if it is not known."""
        if self.shape is None:
            return options.shape(path) if isinstance(options, DataSetOptions) else DataShape(task=self.task)
        shape = self.shape if isinstance(self.shape, DataShape) else self.shape(options)
        return replace(shape, task=shape.task or self.task)

    def make(self, options: BaseModel, path: str | None, seed: int) -> Any:
        """Call `build` with the options, and with ``path`` and ``seed`` if it takes them."""
        build = load(self.build) if isinstance(self.build, str) else self.build
        settings: dict[str, Any] = {"path": path} if self.takes_path else {}
        if "seed" in inspect.signature(build).parameters:
            settings["seed"] = seed
        return build(**dict(options), **settings) if self.as_keywords else build(options, **settings)
