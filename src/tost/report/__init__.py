"""Read training runs, compare them, and write one HTML page about them.

Importing this package loads no torch: the names below are loaded on first use.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
