"""How a run shows itself: a live bar on a terminal, one greppable line per record elsewhere, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from tost.cli import _console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tost.train.loop import LineReporter, Reporter
    from tost.train.metrics import StepRecord

ProgressStyle = Literal["auto", "live", "plain", "none"]
"""How a run shows what it does on stderr."""


def is_first() -> bool:
    """Whether this is the process that speaks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def open_reporter(style: ProgressStyle, steps: int) -> Iterator[Reporter]:
    """Return the reporter for a run of `steps` steps, for the duration of a ``with`` block."""
    from tost.train.loop import LineReporter, SilentReporter

    if style == "none" or not is_first():
        yield SilentReporter()
    elif style == "plain" or (style == "auto" and not _console.is_live()):
        yield LineReporter()
    else:
        with _console.live_bars("bar", "count", "description") as progress:
            lines = LineReporter(lambda text: _console.print_above(progress, text))
            yield _Live(lines, progress, progress.add_task("starting", total=steps))


class _Live:
    """Steps move a bar; everything else is a line above it."""

    def __init__(self, lines: LineReporter, progress: Progress, task: TaskID) -> None:
        self._lines, self._progress, self._task = lines, progress, task

    def message(self, text: str) -> None:
        self._lines.message(text)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.evaluation(step, metrics)

    def step(self, record: StepRecord) -> None:
        from tost.train.metrics import format_line

        fields = format_line(record).partition(" | ")[2]
        self._progress.update(self._task, completed=record.step, description=fields)
