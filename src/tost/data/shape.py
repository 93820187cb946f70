"""What a data set says about its samples, and what the options of every data set have in common. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from tost.data.registry import Task

__all__ = ["OURS", "DataInfo", "DataSetOptions", "DataShape", "problem"]

OURS: Final = "data_option"
"""The kind of problem that is described in our own words."""


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """What a model must fit.

    Attributes:
        task: ``"classification"``, ``"image_classification"`` or ``"language_modeling"``.
        input: ``"tokens"`` for ids ``[N]``, ``"values"`` for numbers ``[N, F]``, ``"image"`` for
            ``[channels, height, width]``.
        length: N, the number of positions of every sample, padding included; None for images.
        vocab_size: Number of different ids; None if samples are no ids.
        in_features: F; None if samples are no values.
        num_classes: Number of classes; None for language modelling.
        in_chans: Channels of an image; None if samples are no images.
        image_size: Height and width of an image; None if samples are no images.
        towers: Sequences per sample, each of `length` positions; with 2, samples have an axis of two more: ``[2, N]``.
    """

    task: Task
    input: Literal["tokens", "values", "image"]
    length: int | None = None
    vocab_size: int | None = None
    in_features: int | None = None
    num_classes: int | None = None
    in_chans: int | None = None
    image_size: tuple[int, int] | None = None
    towers: int = 1

    def model_options(self) -> dict[str, Any]:
        """Return the options that a model of this task takes from its data."""
        if self.input == "image" and self.image_size is not None:
            height, width = self.image_size
            size = height if height == width else (height, width)
            return {"num_classes": self.num_classes, "in_chans": self.in_chans, "image_size": size}
        options: dict[str, Any] = {"max_length": self.length}
        if self.task == "classification":
            options |= {"input": self.input, "num_classes": self.num_classes}
        if self.input == "tokens":
            options |= {"vocab_size": self.vocab_size}
        else:
            options |= {"in_features": self.in_features}
        if self.towers > 1:
            options |= {"towers": self.towers}
        return options


@dataclass(frozen=True, kw_only=True)
class DataInfo(DataShape):
    """A data set that was built: its shape, and what identifies its content.

    Attributes:
        name: Its name in the registry.
        fingerprint: SHA-256 of the content of both splits, in hexadecimal; the same wherever the data is the same.
            Large sets of files are identified by their listing instead: names and sizes.
        details: Facts for the record of a run, such as the number of source files.
        class_names: What each class is called, in the order of the labels; empty if nobody says.
    """

    name: str
    fingerprint: str
    details: Mapping[str, int | str] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()


class DataSetOptions(BaseModel):
    """What the options of every data set have in common: fixed once made, no unknown names, no conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def shape(self) -> DataShape:
        """Return what a model must fit."""
        raise NotImplementedError

    def shape_of(self, path: str | None) -> DataShape:
        """Return what a model must fit if the data lies at `path`, which few data sets have to look at."""
        return self.shape()


def problem(reason: str) -> PydanticCustomError:
    """Return an error that a validator of options raises, in our own words.

    Args:
        reason: What was given, what is needed, what to do.
    """
    # The reason is passed as a value, because braces in the message itself would be taken for placeholders.
    return PydanticCustomError(OURS, "{reason}", {"reason": reason})
