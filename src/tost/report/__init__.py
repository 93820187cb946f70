"""One page about training runs: what was trained, how it went, what is inside, how fast it is. Loads no torch.

What is on disk is read (`runs.py`, `bench.py`), models are looked into (`look.py`) and asked for text (`texts.py`),
and everything is set as HTML that needs nothing but itself (`page.py` and the files that it uses).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tost._lazy import lazy

if TYPE_CHECKING:
    from tost.report.bench import BenchRecord, read_bench
    from tost.report.look import Finding, Insight, look_into
    from tost.report.page import Content, render
    from tost.report.runs import RunRecord, read_run, read_runs
    from tost.report.samples import Opened, open_run
    from tost.report.texts import Passage, continue_prompts
    from tost.report.write import Request, write_report

__all__ = [
    "BenchRecord",
    "Content",
    "Finding",
    "Insight",
    "Opened",
    "Passage",
    "Request",
    "RunRecord",
    "continue_prompts",
    "look_into",
    "open_run",
    "read_bench",
    "read_run",
    "read_runs",
    "render",
    "write_report",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "bench": ("BenchRecord", "read_bench"),
        "look": ("Finding", "Insight", "look_into"),
        "page": ("Content", "render"),
        "runs": ("RunRecord", "read_run", "read_runs"),
        "samples": ("Opened", "open_run"),
        "texts": ("Passage", "continue_prompts"),
        "write": ("Request", "write_report"),
    },
)
