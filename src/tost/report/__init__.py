"""One page about training runs: what was trained, how it went, what is inside, how fast it is. Loads no torch.

What is on disk is read (`runs.py`, `bench.py`), models are looked into (`look.py`) and asked for text (`texts.py`),
and everything is set as HTML that needs nothing but itself (`page.py` and the files that it uses).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tost.report.bench import BenchRecord, read_bench
    from tost.report.look import Finding, Insight, look_into
    from tost.report.page import Content, render
    from tost.report.runs import RunRecord, read_run, read_runs
    from tost.report.texts import Passage, continue_prompts
    from tost.report.write import Request, write_report

__all__ = [
    "BenchRecord",
    "Content",
    "Finding",
    "Insight",
    "Passage",
    "Request",
    "RunRecord",
    "continue_prompts",
    "look_into",
    "read_bench",
    "read_run",
    "read_runs",
    "render",
    "write_report",
]

_HOME = {
    "bench": ("BenchRecord", "read_bench"),
    "look": ("Finding", "Insight", "look_into"),
    "page": ("Content", "render"),
    "runs": ("RunRecord", "read_run", "read_runs"),
    "texts": ("Passage", "continue_prompts"),
    "write": ("Request", "write_report"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            value = getattr(import_module(f"tost.report.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'tost.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
