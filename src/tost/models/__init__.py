"""The models: a registry of names, their options, and the networks. Importing this package loads no torch."""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
