"""Which data sets exist. This file imports no torch: the command line lists names before it knows what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from tost.errors import ConfigError

__all__ = ["DataSpec", "Task", "did_you_mean", "find_data", "list_data"]

Task = Literal["classification", "image_classification", "language_modeling"]


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """One data set.

    Attributes:
        name: What a configuration says under ``data.name``.
        task: The recipe that can train on it.
        description: One line for tables.
        takes_path: True if ``data.path`` must say where the files are, False if there are no files to point to.
    """

    name: str
    task: Task
    description: str
    takes_path: bool = False


_SPECS = {
    spec.name: spec
    for spec in (
        DataSpec(
            name="digits",
            task="classification",
            description="handwritten digits of scikit-learn, 8 x 8 grey pixels as a sequence of 64; 10 classes",
        ),
        DataSpec(
            name="listops",
            task="classification",
            description="nested list operations drawn from a seeded grammar; the class is the value, 0 to 9",
        ),
        DataSpec(
            name="stdlib_bytes",
            task="language_modeling",
            description="bytes of the Python standard library's own source files, 256 symbols",
        ),
        DataSpec(
            name="tokens",
            task="language_modeling",
            description="any text, as the folder of tokens that `tost data prepare` makes",
            takes_path=True,
        ),
        *(
            DataSpec(name=name, task="classification", description=description, takes_path=True)
            for name, description in (
                ("lra_image", "Long Range Arena: CIFAR-10 in grey, 1024 pixels as a sequence; 10 classes"),
                ("lra_listops", "Long Range Arena: nested list operations of up to 2000 symbols; the value, 0 to 9"),
                ("lra_pathfinder", "Long Range Arena: do two discs lie on one dashed curve? 1024 pixels; 2 classes"),
                ("lra_pathx", "Long Range Arena: the same with 16,384 pixels (Path-X)"),
                ("lra_retrieval", "Long Range Arena: are two papers related? bytes of both (AAN); 2 classes"),
                ("lra_text", "Long Range Arena: bytes of reviews of films (IMDb), negative or positive"),
            )
        ),
        *(
            DataSpec(name=name, task="image_classification", description=description, takes_path=True)
            for name, description in (
                ("cifar10", "photographs of 32 x 32 pixels, 10 classes; parquet or the binary version"),
                ("cifar100", "photographs of 32 x 32 pixels, 100 classes; parquet or the binary version"),
                ("fashion_mnist", "clothes, 28 x 28 grey pixels, 10 classes; idx files, packed or not"),
                ("flowers102", "Oxford flowers, 102 classes, in the official splits"),
                ("image_folder", "any images, sorted into folders: <split>/<class>/<image>"),
                ("image_parquet", "any images in parquet files with a column of images and one of labels"),
                ("imagenet", "ImageNet-1k, 1000 classes; folders, tar files or parquet files; ReaL labels"),
                ("pets", "Oxford-IIIT cats and dogs, 37 breeds, in the official splits"),
            )
        ),
    )
}


def list_data(pattern: str = "*") -> list[str]:
    """Return the names that match a shell pattern, sorted.

    Args:
        pattern: Such as ``"*bytes"``.

    Returns:
        Names that `find_data` knows.
    """
    return sorted(name for name in _SPECS if fnmatchcase(name, pattern))


def find_data(name: str) -> DataSpec:
    """Return the data set called `name`.

    Raises:
        ConfigError: There is none; the message lists those that exist.
    """
    if name not in _SPECS:
        raise ConfigError(
            f"unknown data set {name!r}; {did_you_mean(name, _SPECS)}the data sets are: {', '.join(list_data())}."
        )
    return _SPECS[name]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'? "`` for a close name among the known ones, or nothing."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""
