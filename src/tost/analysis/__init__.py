"""Look inside: what the layers of a model do, as numbers and as pictures.

Importing this package loads no torch: the names below are loaded on first use.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
