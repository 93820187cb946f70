"""tost: attention from token statistics, in linear time, with a constant-size state.

Public names are loaded on first use, so that ``import tost`` and the command line's help stay instant.
"""

from typing import Any

from tost._lazy import attach
from tost._threads import prepare as _prepare_threads

_prepare_threads()
_load_name, __dir__, __all__ = attach(__name__)


def __getattr__(name: str) -> Any:
    return _find_version() if name == "__version__" else _load_name(name)


def _find_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and rarely needed

    try:
        return version("tost")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0+unknown"
