"""Run configuration: schema, reading, validation and writing. Loads no torch."""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
