"""Environment variables: legal values, default, and one line of help for each.

Parsing is strict. A value outside the list is an error that shows the list, never a silent default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tost.errors import ConfigError

VARIABLES: list[Variable] = []
"""Every variable that was declared. ``TOST_BACKEND`` is declared with the backends, in `tost.ops.backends`."""


@dataclass(frozen=True, kw_only=True)
class Variable:
    """An environment variable. Declaring one adds it to `VARIABLES`.

    Attributes:
        name: Its name.
        help: What it does.
        values: The values it takes; empty for any text.
        default: The value if it is not set.
    """

    name: str
    help: str
    values: tuple[str, ...] = ()
    default: str = ""

    def __post_init__(self) -> None:
        VARIABLES.append(self)

    def get(self) -> str:
        """Return the value in force.

        Raises:
            ConfigError: The variable is set to something that is not in `values`.
        """
        value = os.environ.get(self.name, self.default)
        if self.values and value not in self.values:
            raise ConfigError(
                f"environment variable {self.name}={value!r} is not understood; "
                f"it takes one of: {', '.join(self.values)}. Unset it to use {self.default!r}."
            )
        return value


NATIVE_ISA = Variable(
    name="TOST_NATIVE_ISA",
    values=("auto", "avx512", "avx2", "baseline"),
    default="auto",
    help="instruction set of the native kernel; auto takes the best that the processor has",
)
PLUGINS = Variable(
    name="TOST_PLUGINS",
    help="packages whose code may be imported by name, separated by commas",
)
NUM_THREADS = Variable(
    name="TOST_NUM_THREADS",
    help="threads of a command; by default one for each of its processors",
)
