"""Kinds of training, and the configurations that come with the package. Importing this package loads no torch."""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
