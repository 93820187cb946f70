"""tost: attention from token statistics, in linear time, with a constant-size state.

Public names are loaded on first use, so that ``import tost`` and the command line's help stay instant.
"""

from importlib.metadata import PackageNotFoundError, version

from tost._lazy import attach

try:
    __version__ = version("tost")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__getattr__, __dir__, __all__ = attach(__name__)
