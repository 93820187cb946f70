"""Functions on tensors: TSSA, causal TSSA, their memberships and state. No modules, no configuration.

Importing this package loads no torch.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
