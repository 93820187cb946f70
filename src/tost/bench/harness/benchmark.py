"""The description of a benchmark: its name, its options and where its code is. Loads no torch."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import import_module
from typing import Any, Self, get_type_hints

import tost.bench
from tost._lazy import load
from tost._text import integers
from tost.errors import ConfigError


class Choice(StrEnum):
    """A choice with a sentence about it: ``ALONE = "alone", "nothing else runs"``."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """Make a choice; its value is the first of the two."""
        choice = str.__new__(cls, value)
        choice._value_, choice.meaning = value, meaning
        return choice

    @classmethod
    def notes(cls) -> tuple[str, ...]:
        """Return what each choice means, a line each."""
        return tuple(f"{choice}: {choice.meaning}" for choice in cls)


@dataclass(frozen=True)
class Option:
    """An option of the command line, attached to a field of a scale: ``repeats: Annotated[int, Option(...)] = 7``.

    A field of type ``tuple[SomeEnum, ...]`` is an option that can be repeated; ``tuple[int, ...]`` and
    ``tuple[str, ...]`` are read from a list with commas.

    Attributes:
        help: One sentence.
        metavar: Placeholder for the value.
        flag: Name without dashes; empty for that of the field.
        reads: Type of the value on the command line; None for that of the field.
        convert: Makes the value of the field from that of the command line.
        least: Smallest value.
        default: Text that stands for the default; empty for the default itself.
        argument: Whether it is given by position.
        selects: Whether another value makes the measurement a selection, which has result files of its own.
        stored: Whether the result files hold it.
    """

    help: str
    metavar: str = ""
    flag: str = ""
    reads: Any = None
    convert: Callable[[Any], Any] | None = None
    least: float | None = None
    default: str = ""
    argument: bool = False
    selects: bool = True
    stored: bool = True


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark, as the command line sees it.

    Attributes:
        name: Its command, and the start of the names of its files.
        help: One sentence.
        scale: Frozen dataclass of what is measured and how long. Fields with an `Option` are options of the command. A
            class method ``quick`` returns the scale of a demonstration, and its docstring explains ``--quick``.
        measurement: The subclass of `Measurement`, as ``package.module:Class``.
        files: What ``--out`` writes.
    """

    name: str
    help: str
    scale: type
    measurement: str
    files: str = "JSON and Markdown"

    @property
    def has_quick(self) -> bool:
        """Whether there is a demonstration."""
        return hasattr(self.scale, "quick")

    def make_scale(self, *, quick: bool = False, **given: Any) -> Any:
        """Return the standard scale, or that of the demonstration, with the given values in place of its own."""
        base = self.scale.quick() if quick else self.scale()  # type: ignore[attr-defined]
        return replace(base, **given)

    def theme(self, scale: Any, *, quick: bool = False) -> str:
        """Return the start of the file names; a demonstration or a selection does not replace the whole."""
        if quick:
            return f"{self.name}-quick"
        standard = self.scale()
        selected = any(
            option.selects and getattr(scale, name) != getattr(standard, name)
            for name, (_, option) in options_of(self.scale).items()
        )
        return f"{self.name}-selection" if selected else self.name

    def start(self, scale: Any) -> Any:
        """Load the code of the benchmark; returns its `Measurement`."""
        return load(self.measurement)(scale)


def options_of(scale: type) -> dict[str, tuple[Any, Option]]:
    """Return the fields of a scale that are options: their types and descriptions."""
    hints = get_type_hints(scale, include_extras=True)
    return {
        name: (hint.__origin__, option)
        for name, hint in hints.items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, Option)
    }


def benchmarks() -> list[Benchmark]:
    """Return all benchmarks, by name."""
    packages = [module.name for module in pkgutil.iter_modules(tost.bench.__path__) if module.ispkg]
    return [import_module(f"tost.bench.{name}.cases").BENCHMARK for name in sorted(packages) if name != "harness"]


def numbers(text: str, flag: str, *, example: str = "1024,4096") -> tuple[int, ...]:
    """Read a list of numbers with commas.

    Raises:
        ConfigError: It is something else.
    """
    if (found := integers(text)) is None:
        raise ConfigError(f"{text!r} is not a list of numbers; write for example --{flag} {example}.")
    return found


def names(text: str) -> tuple[str, ...]:
    """Read a list of names with commas; each counts once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def written(value: object) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, dict):
        return ",".join(f"{key}:{part}" for key, part in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
