"""Names of options and parameters in files of earlier versions, and what they are called now. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import TypeVar

__all__ = ["RENAMED", "current_names"]

Value = TypeVar("Value")

RENAMED = {
    r"^local$": "conv_width",
    r"^local_at$": "conv_at",
    r"\.local\.weight$": ".conv.weight",
    r"\.local_mlp\.weight$": ".conv_mlp.weight",
}
"""Patterns of old names and their replacements: options first, then parameters."""


def current_names(given: Mapping[str, Value], known: Container[str]) -> dict[str, Value]:
    """Return options or tensors of a file under today's names.

    Args:
        given: What the file holds, by name.
        known: Names that the model has. Only a name that it lacks is replaced, by one that it has.
    """
    return {name if name in known else _current(name, known): value for name, value in given.items()}


def _current(name: str, known: Container[str]) -> str:
    found = (re.sub(old, new, name) for old, new in RENAMED.items())
    return next((now for now in found if now in known), name)
