"""Measure and draw what the layers of a model do.

Importing this package loads no torch: the names below are loaded on first use.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
