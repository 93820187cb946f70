"""The token mixers: what each is called, which options it has, where it fits and how much it computes. Loads no torch.

A mixer is one entry in `builtin` and one class in `tost.nn`, or a class of another package with `register_mixer`. Every
model with an option ``mixer`` takes those that fit it.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
