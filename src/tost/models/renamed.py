"""Names of options and parameters in files of earlier versions, and what they are called now. Loads no torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

OPTIONS = {"local": "conv_width", "local_at": "conv_at", "beyond": "after_last_position"}
VALUES: dict[tuple[str, Any], Any] = {("after_last_position", "hold"): "repeat"}
"""By today's name of an option and a former value: today's value."""
PARAMETERS = {".local.weight": ".conv.weight", ".local_mlp.weight": ".conv_mlp.weight"}
"""Endings of the names of parameters."""


def current_names(given: Mapping[str, Value], known: Container[str]) -> dict[str, Value]:
    """Return options or tensors of a file under today's names.

    Args:
        given: What the file holds, by name.
        known: Names that the model has. Only a name that it lacks is replaced, by one that it has.
    """
    named = {name if name in known else _current(name, known): value for name, value in given.items()}
    return {
        name: VALUES.get((name, value), value) if isinstance(value, str) else value for name, value in named.items()
    }


def _current(name: str, known: Container[str]) -> str:
    found = [OPTIONS.get(name, name), *(name.removesuffix(old) + new for old, new in PARAMETERS.items())]
    return next((now for now in found if now in known), name)


def former_name(parameter: str) -> str:
    """Return the name of a parameter in the first version, by which its files identify weights."""
    for old, new in PARAMETERS.items():
        if parameter.endswith(new):
            return parameter.removesuffix(new) + old
    return parameter
