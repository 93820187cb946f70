"""Numbers, text and records in MATLAB files of version 5, the form of the label lists that Oxford and ImageNet publish.

A damaged file can make SciPy's compiled reader leave its memory and end the program. This one is in Python and knows
only what those lists use; everything else in a file is passed over, or refused if it is asked for.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tost._io import read_at_most
from tost.errors import ConfigError

_MOST_BYTES = 16 * 2**20  # of a file, and of an unpacked variable
_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15  # kinds of elements that are not plain numbers
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXT = {1: "latin-1", 2: "latin-1", 4: "", 16: "utf-8", 17: ""}  # empty for two bytes each
_RECORDS, _CHARACTERS, _NUMERIC = 2, 4, range(6, 16)  # classes of variables


class _Element(NamedTuple):
    """A piece of a file: a number that says what it is, and its bytes."""

    kind: int
    content: memoryview


def read_matlab(path: Path, names: Sequence[str], dtype: Any = None) -> list[Any]:
    """Return variables of a MATLAB file.

    Args:
        path: The file.
        names: Of the variables.
        dtype: Type of array to convert them to; None keeps theirs.

    Returns:
        For each name an array of one dimension, a text, or a list with a dictionary for each record.

    Raises:
        ConfigError: It is no such file, or a variable is missing.
    """
    try:
        content = read_at_most(path, _MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES:,} bytes")
        found = dict(_variables(memoryview(content), names))
        missing = [name for name in names if found.get(name) is None]
        if missing:
            raise ValueError(f"there is no {missing[0]} that can be read")
        return [found[name] if dtype is None else np.asarray(found[name], dtype=dtype) for name in names]
    except (OSError, LookupError, ValueError, TypeError, OverflowError, struct.error, zlib.error) as error:
        # TypeError and OverflowError: records in the place of numbers, numbers beyond the type.
        raise ConfigError(f"{path} cannot be read as a MATLAB file with {', '.join(names)}: {error}") from error


def _variables(content: memoryview, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the variables that are asked for."""
    order = {b"IM": "<", b"MI": ">"}.get(bytes(content[126:_HEADER]))
    if order is None:
        raise ValueError("it does not start with the header of version 5")
    for element in _elements(content[_HEADER:], order):
        if element.kind == _COMPRESSED:
            unpacked = zlib.decompressobj().decompress(element.content, _MOST_BYTES + 1)
            if len(unpacked) > _MOST_BYTES:
                raise ValueError(f"a variable unpacks to more than {_MOST_BYTES:,} bytes")
            element = _next(_elements(memoryview(unpacked), order))
        if element.kind == _MATRIX:
            name, value = _variable(element, order, names)
            if name in names:
                yield name, value


def _elements(content: memoryview, order: str) -> Iterator[_Element]:
    """Yield the pieces that follow each other."""
    at = 0
    while at + 8 <= len(content):
        kind, size = struct.unpack(f"{order}II", content[at : at + 8])
        start = at + 8
        if kind >> 16:  # four bytes at most stand beside their size
            kind, size, start = kind & 0xFFFF, min(4, kind >> 16), at + 4
        if start + size > len(content):
            raise ValueError("it ends in the middle of a variable")
        yield _Element(kind, content[start : start + size])
        at = start + size if kind == _COMPRESSED else -(-(start + size) // 8) * 8


def _next(parts: Iterator[_Element]) -> _Element:
    element = next(parts, None)
    if element is None:
        raise ValueError("it ends in the middle of a variable")
    return element


def _variable(element: _Element, order: str, names: Sequence[str] | None = None) -> tuple[str, Any]:
    """Return the name and the value of a variable; None for one of another name or kind."""
    parts = _elements(element.content, order)
    kind = int(_numbers(_next(parts), order)[0]) & 0xFF
    count = math.prod(_numbers(_next(parts), order).tolist())
    name = bytes(_next(parts).content).decode("latin-1")
    if names is not None and name not in names:
        return name, None
    if kind == _RECORDS and names is not None:  # one level of them
        return name, list(_records(parts, order, count))
    if kind == _CHARACTERS:
        return name, _text(_next(parts), order)
    if kind not in _NUMERIC:
        return name, None
    numbers = _numbers(_next(parts), order)
    if len(numbers) != count:
        raise ValueError(f"{len(numbers):,} values of {name!r} for {count:,} entries")
    return name, numbers


def _records(parts: Iterator[_Element], order: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield records: their fields are numbers, arrays or texts, and None where they are something else."""
    length = int(_numbers(_next(parts), order)[0])
    packed = bytes(_next(parts).content)
    if length < 1 or not packed:
        raise ValueError("records without fields")
    fields = [packed[at : at + length].partition(b"\0")[0].decode("latin-1") for at in range(0, len(packed), length)]
    for _ in range(count):
        values = {field: _variable(_next(parts), order)[1] for field in fields}
        yield {k: v.item() if isinstance(v, np.ndarray) and v.size == 1 else v for k, v in values.items()}


def _numbers(element: _Element, order: str) -> np.ndarray[Any, Any]:
    if element.kind not in _NUMBERS:
        raise ValueError(f"an element of kind {element.kind} in the place of numbers")
    return np.frombuffer(element.content, dtype=f"{order}{_NUMBERS[element.kind]}")


def _text(element: _Element, order: str) -> str:
    if element.kind not in _TEXT:
        raise ValueError(f"an element of kind {element.kind} in the place of text")
    wide = {"<": "utf-16-le", ">": "utf-16-be"}[order]
    return bytes(element.content).decode(_TEXT[element.kind] or wide)
