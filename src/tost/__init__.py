"""tost: attention from token statistics, in linear time, with a constant-size state.

Public names are loaded on first use, so that ``import tost`` and the command line's help stay instant.
"""

from typing import Any

from tost._lazy import attach

_load_name, __dir__, __all__ = attach(__name__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from tost._machine import VERSION  # its imports are slow and rarely needed

        return VERSION
    return _load_name(name)
