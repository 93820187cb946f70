"""Every environment variable that the package reads: its legal values, its default, one line of help.

Parsing is strict. A value outside the list is an error that shows the list, never a silent default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tost.errors import ConfigError

__all__ = ["BACKEND", "NATIVE_ISA", "PLUGINS", "VARIABLES", "Variable"]

PLUGINS = "TOST_PLUGINS"
"""Packages whose code may be imported by name, separated by commas; see `tost._plugins`."""


@dataclass(frozen=True)
class Variable:
    """One environment variable with a closed list of values."""

    name: str
    values: tuple[str, ...]
    default: str
    help: str

    def get(self) -> str:
        """Return the value in force.

        Raises:
            ConfigError: The variable is set to something that is not in `values`.
        """
        value = os.environ.get(self.name, self.default)
        if value not in self.values:
            raise ConfigError(
                f"environment variable {self.name}={value!r} is not understood; "
                f"it takes one of: {', '.join(self.values)}. Unset it to use {self.default!r}."
            )
        return value


BACKEND = Variable(
    name="TOST_BACKEND",
    values=("auto", "native", "torch", "reference"),
    default="auto",
    help='which implementation `backend="auto"` means',
)
NATIVE_ISA = Variable(
    name="TOST_NATIVE_ISA",
    values=("auto", "avx512", "avx2", "baseline"),
    default="auto",
    help="instruction set of the native kernel; auto takes the best that the processor has",
)
VARIABLES = (BACKEND, NATIVE_ISA)
