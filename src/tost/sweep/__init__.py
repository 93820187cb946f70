"""Sweeps: runs that belong together, and the one table that comes out of them. Importing this package loads no torch.

A plan (`plan.py`) becomes a list of runs (`runs.py`), each a process of its own (`runner.py`); what they leave in
their folders is gathered (`results.py`) and shown (`report.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tost._lazy import lazy

if TYPE_CHECKING:
    from tost.sweep.plan import Arm, Plan, find_plan, list_plans, load_plan, plan_summary
    from tost.sweep.report import Table, fill, page, section, statements, table
    from tost.sweep.results import collect, metric_problem, read_results, write_results
    from tost.sweep.runner import Outcome, Watcher, claim, execute, progress_of, start_process, tail
    from tost.sweep.runs import Run, State, check_folders, expand, select, state_of, unfinished

__all__ = [
    "Arm",
    "Outcome",
    "Plan",
    "Run",
    "State",
    "Table",
    "Watcher",
    "check_folders",
    "claim",
    "collect",
    "execute",
    "expand",
    "fill",
    "find_plan",
    "list_plans",
    "load_plan",
    "metric_problem",
    "page",
    "plan_summary",
    "progress_of",
    "read_results",
    "section",
    "select",
    "start_process",
    "state_of",
    "statements",
    "table",
    "tail",
    "unfinished",
    "write_results",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "plan": ("Arm", "Plan", "find_plan", "list_plans", "load_plan", "plan_summary"),
        "report": ("Table", "fill", "page", "section", "statements", "table"),
        "results": ("collect", "metric_problem", "read_results", "write_results"),
        "runner": ("Outcome", "Watcher", "claim", "execute", "progress_of", "start_process", "tail"),
        "runs": ("Run", "State", "check_folders", "expand", "select", "state_of", "unfinished"),
    },
)
