"""Modules around the operators.

Importing this package loads no torch.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
