"""Sweeps: runs that belong together, and the one table that comes out of them. Importing this package loads no torch.

A plan (`plan.py`) becomes a list of runs (`runs.py`), each a process of its own (`runner.py`); what they leave in
their folders is gathered (`results.py`) and shown (`summary.py`).
"""

from tost._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
