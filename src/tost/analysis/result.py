"""Results of analyses: numbers that can be printed, stored and drawn."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tost._io import write_atomic
from tost._text import html_card
from tost.errors import StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Result:
    """Base class of the results of analyses, usually frozen dataclasses of numbers and tensors.

    A subclass sets `name` and defines `summary`; the rest has defaults. A `figure` method imports matplotlib, so that
    it is loaded only when a picture is wanted.
    """

    name: ClassVar[str]
    """Name of the analysis; also the name of the files that `save` writes."""

    not_stored: ClassVar[tuple[str, ...]] = ()
    """Attributes that `to_json` leaves out."""

    is_photographic: ClassVar[bool] = False
    """Whether pictures are better stored as pixels than as lines."""

    def summary(self) -> dict[str, Any]:
        """Return the few numbers that are worth printing, each with a name that explains it."""
        raise NotImplementedError(f"{type(self).__name__} defines no summary()")

    def verdict(self) -> str:
        """Return the conclusion in a sentence or two; empty if that is left to the reader."""
        return ""

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers as a flat table, one dictionary per row, all with the same keys."""
        return [self.summary()]

    def to_json(self) -> dict[str, Any]:
        """Return all attributes and the summary as plain data: numbers that are not finite are None."""
        stored = {name: plain(value) for name, value in vars(self).items() if name not in self.not_stored}
        return {**stored, "summary": plain(self.summary())}

    def figure(self) -> Figure | None:
        """Draw it; None if there is no picture."""
        return None

    def _repr_html_(self) -> str:
        """Return the summary and the picture for a notebook."""
        picture = base64.b64encode(image_bytes(self)).decode()
        shown = f'<img src="data:image/png;base64,{picture}">' if picture else ""
        return html_card(self.name, self.summary()) + shown


def grid_rows(axes: Mapping[str, Sequence[Any]], values: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return tensors over a grid, such as layers by heads, as a flat table with one row per cell.

    Args:
        axes: Names of the axes with the labels along them; the last one varies fastest.
        values: Tensors by column, indexed by all axes or by the first ones.
    """
    return [
        {name: axes[name][i] for name, i in zip(axes, place, strict=True)}
        | {column: tensor[place[: tensor.dim()]].item() for column, tensor in values.items()}
        for place in product(*(range(len(labels)) for labels in axes.values()))
    ]


def span(values: Tensor, form: str = ".4f") -> str:
    """Write the least and the most of some numbers."""
    return f"{values.min().item():{form}}, {values.max().item():{form}}"


def plain(value: Any) -> Any:
    """Return tensors, tuples and mappings as lists and dictionaries; numbers that are not finite as None."""
    if isinstance(value, Tensor):
        return value.tolist() if value.isfinite().all() else plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(values: Tensor, digits: int = 4) -> Any:
    """Return a tensor as lists of numbers with a few digits after the point."""
    return plain(values.double().round(decimals=digits))


def entropy(pi: Tensor, dim: int = -1) -> Tensor:
    """Return the entropy of distributions as a share of the largest possible: 0 for one-hot, 1 for uniform.

    Args:
        pi: Not negative, adding up to 1 along `dim`.
        dim: The axis of the distribution.
    """
    return (0 - torch.special.xlogy(pi, pi).sum(dim)) / math.log(max(pi.shape[dim], 2))


def image_bytes(result: Result, image_format: str = "png") -> bytes:
    """Draw a result and return the content of the image file.

    Args:
        result: What to draw.
        image_format: Any format that matplotlib writes, such as ``"png"`` or ``"svg"``.

    Returns:
        As SVG, the same bytes for the same result. Empty if the result has no picture.
    """
    figure = result.figure()
    if figure is None:
        return b""
    from tost.analysis import plots

    return plots.encode(figure, image_format)


def save(result: Result, folder: str | Path, stem: str | None = None) -> list[Path]:
    """Write a result as pictures and as data.

    Args:
        result: What an analysis returned.
        folder: Where to write; created if it does not exist.
        stem: Name of the files without their endings; by default the name of the analysis.

    Returns:
        The files: ``.png``, ``.svg``, ``.json`` and ``.csv``; no pictures if the result has none.

    Raises:
        StorageError: They cannot be written.
    """
    stem = stem or result.name
    rows = result.rows()
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[0]) if rows else ["empty"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    contents: dict[str, bytes | str] = {
        "png": image_bytes(result, "png"),
        "svg": image_bytes(result, "svg"),
        "json": json.dumps({"analysis": result.name, **result.to_json()}, allow_nan=False) + "\n",
        "csv": table.getvalue(),
    }
    files = {Path(folder) / f"{stem}.{ending}": content for ending, content in contents.items() if content}
    try:
        for file, content in files.items():
            write_atomic(file, content, sync=False)
    except OSError as error:
        raise StorageError(f"cannot write {stem} to {folder}: {error.strerror or error}") from error
    return list(files)
