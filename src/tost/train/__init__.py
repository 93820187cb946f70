"""Training: the configuration of a run, the loop and its parts.

Importing this package loads no torch: the names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tost.train.config import RunConfig, config_hash, dump_config, load_config
    from tost.train.loop import RunResult, fit
    from tost.train.task import Outcome, Task

__all__ = ["Outcome", "RunConfig", "RunResult", "Task", "config_hash", "dump_config", "fit", "load_config"]

_HOME = {
    "Outcome": "task",
    "RunConfig": "config",
    "RunResult": "loop",
    "Task": "task",
    "config_hash": "config",
    "dump_config": "config",
    "fit": "loop",
    "load_config": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tost.train' has no attribute {name!r}")
    value = getattr(import_module(f"tost.train.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
