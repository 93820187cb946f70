"""Training: the configuration of a run, the loop and its parts.

Importing this package loads no torch: the names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tost._lazy import lazy

if TYPE_CHECKING:
    from tost.train.config import RunConfig, config_hash, dump_config, load_config
    from tost.train.loop import RunResult, fit
    from tost.train.task import Outcome, Task

__all__ = ["Outcome", "RunConfig", "RunResult", "Task", "config_hash", "dump_config", "fit", "load_config"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "config": ("RunConfig", "config_hash", "dump_config", "load_config"),
        "loop": ("RunResult", "fit"),
        "task": ("Outcome", "Task"),
    },
)
