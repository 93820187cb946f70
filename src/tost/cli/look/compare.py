"""`tost compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tost._text import UNKNOWN
from tost.cli import _console
from tost.cli._arguments import Json


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Show runs side by side: status, steps, best result, size, speed, and the settings in which they differ."""
    from tost.report.runs import as_cells, differences, find_runs, read_runs, summarize

    folders = [found for folder in runs for found in find_runs(folder) or [folder]]
    records = read_runs(folders)
    summaries = [summarize(record) for record in records]
    _console.show_entries([as_cells(summary) for summary in summaries])
    differing = differences(records) if len(records) > 1 else {}
    if differing:
        rows = [
            (key, *(UNKNOWN if value is None else str(value) for value in values)) for key, values in differing.items()
        ]
        _console.show()
        _console.show_table(("setting", *(record.name for record in records)), rows, title="Settings that differ")
    if json:
        _console.show_json({"runs": summaries, "differences": differing})
