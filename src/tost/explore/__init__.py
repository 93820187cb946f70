"""A page to look inside models with: type, drop a picture, compare. `tost explore` serves it on this machine only.

The page asks, this package answers with the analyses of `tost.analysis`, and nothing leaves the machine.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
