"""Text generation: a prompt is read into a state of constant size, then every token costs the same.

Importing this package loads no torch.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
