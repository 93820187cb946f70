"""Small trained models that come with the package, with their cards; see `load_pretrained`.

``scripts/train_pretrained.py`` trains them and writes ``weights/``: a model folder each, and an index of them.
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
