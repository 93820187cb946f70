"""What every analysis returns: typed data that turns into JSON, a table, a few numbers and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from tost.errors import StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Result", "entropy", "image_bytes", "plain", "save"]

DPI = 130


class Result(Protocol):
    """The result of an analysis: a frozen dataclass. Drawing is apart from computing and loads matplotlib only then."""

    name: ClassVar[str]
    """What the analysis is called on the command line."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data: numbers that are not finite are None."""
        ...

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers as a flat table, one dictionary per row, all with the same keys."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return the few numbers that are worth printing, each with a name that explains it."""
        ...

    def figure(self) -> Figure:
        """Draw it."""
        ...


def plain(value: Any) -> Any:
    """Return tensors, tuples and mappings as lists and dictionaries; numbers that are not finite as None."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def entropy(pi: Tensor, dim: int = -1) -> Tensor:
    """Return the entropy of distributions as a share of the largest possible: 0 for one-hot, 1 for uniform.

    Args:
        pi: Not negative, adding up to 1 along `dim`.
        dim: The axis of the distribution.
    """
    count = pi.shape[dim]
    if count == 1:
        return torch.zeros_like(pi.select(dim, 0))
    found: Tensor = -torch.special.xlogy(pi, pi).sum(dim) / math.log(count)
    return found


def image_bytes(result: Result, image_format: str = "png") -> bytes:
    """Draw a result and return the content of the image file.

    Args:
        result: What to draw.
        image_format: Any format that matplotlib writes, such as ``"png"`` or ``"svg"``.

    Returns:
        As SVG, the same bytes for the same result.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "tost", "svg.fonttype": "path"}):
        figure = result.figure()
        buffer = io.BytesIO()
        metadata = {"Date": None} if image_format == "svg" else None
        figure.savefig(buffer, format=image_format, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def save(result: Result, folder: str | Path, stem: str | None = None) -> list[Path]:
    """Write a result as pictures and as data.

    Args:
        result: What an analysis returned.
        folder: Where to; made if it is not there.
        stem: Name of the files without their endings; by default the name of the analysis.

    Returns:
        The files: ``.png``, ``.svg``, ``.json`` and ``.csv``.

    Raises:
        StorageError: They cannot be written.
    """
    target, stem = Path(folder), stem or result.name
    table = io.StringIO()
    rows = result.rows()
    writer = csv.DictWriter(table, fieldnames=list(rows[0]) if rows else ["empty"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    contents = {
        "png": image_bytes(result, "png"),
        "svg": image_bytes(result, "svg"),
        "json": (json.dumps({"analysis": result.name, **result.to_json()}, allow_nan=False) + "\n").encode(),
        "csv": table.getvalue().encode(),
    }
    files = [target / f"{stem}.{ending}" for ending in contents]
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file, content in zip(files, contents.values(), strict=True):
            file.write_bytes(content)
    except OSError as error:
        raise StorageError(f"cannot write {stem} to {target}: {error.strerror or error}") from error
    return files
