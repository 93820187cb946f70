"""Token mixers that TSSA is compared with, all with one interface. Importing this package loads no torch.

Each is called as ``mixer(x, mask)``, from tokens ``[B, N, C]`` and an optional bool mask ``[B, N]`` of the real ones to
``[B, N, C]``. Padding never counts. Each class documents whether a mask has exactly the effect of a deletion.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
