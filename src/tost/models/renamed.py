"""Names of options and parameters in files of earlier versions, and what they are called now. Loads no torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

OPTIONS = {"local": "conv_width", "local_at": "conv_at", "beyond": "after_last_position"}
VALUES = {"after_last_position": {"hold": "repeat"}}
"""By today's name of an option: its former values."""
PARAMETERS = {".local.weight": ".conv.weight", ".local_mlp.weight": ".conv_mlp.weight"}
"""Endings of the names of parameters."""


def current_names(given: Mapping[str, Value], known: Container[str]) -> dict[str, Value]:
    """Return options or tensors of a file under today's names.

    Args:
        given: What the file holds, by name.
        known: Names that the model has. Only a name that it lacks is replaced, by one that it has.
    """
    named = {name if name in known else _current(name, known): value for name, value in given.items()}
    values: dict[str, Any] = {name: VALUES[name][value] for name, value in named.items() if _is_former(name, value)}
    return named | values


def _current(name: str, known: Container[str]) -> str:
    found = [OPTIONS.get(name, name), *(name.removesuffix(old) + new for old, new in PARAMETERS.items())]
    return next((now for now in found if now in known), name)


def _is_former(name: str, value: object) -> bool:
    return isinstance(value, str) and value in VALUES.get(name, ())


def former_name(parameter: str) -> str:
    """Return the name of a parameter in the first version, by which its files identify weights."""
    for old, new in PARAMETERS.items():
        if parameter.endswith(new):
            return parameter.removesuffix(new) + old
    return parameter
