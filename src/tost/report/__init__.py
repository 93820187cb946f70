"""One page about training runs: what was trained, how it went, what is inside, how fast it is. Loads no torch.

What is on disk is read (`runs.py`, `bench.py`), models are looked into (`look.py`) and asked for text (`texts.py`),
and everything is set as HTML that needs nothing but itself (`page.py` and the files that it uses).
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
