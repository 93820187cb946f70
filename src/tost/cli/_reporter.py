"""How a run shows itself: a live bar on a terminal, one greppable line per record elsewhere, or nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from tost._text import printable
from tost.cli import _console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tost.train.loop import Reporter
    from tost.train.metrics import StepRecord

ProgressStyle = Literal["auto", "live", "plain", "none"]
"""How a run shows what it does on stderr."""


def is_first() -> bool:
    """Whether this is the process that speaks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def open_reporter(style: ProgressStyle, steps: int) -> Iterator[Reporter]:
    """Return the reporter for a run of `steps` steps, for the duration of a ``with`` block."""
    if style == "none" or not is_first():
        from tost.train.loop import SilentReporter

        yield SilentReporter()
    elif style == "plain" or (style == "auto" and not sys.stderr.isatty()):
        yield _Plain()
    else:
        with _console.live_bars("bar", "count", "description") as progress:
            yield _Live(progress, progress.add_task("starting", total=steps))


class _Plain:
    def message(self, text: str) -> None:
        _console.log(text)

    def step(self, record: StepRecord) -> None:
        from tost.train.metrics import format_line

        _console.log(format_line(record))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        values = " | ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.message(f"eval step {step} | {values}")


class _Live(_Plain):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def message(self, text: str) -> None:
        self._progress.console.print(printable(text), markup=False, highlight=False)

    def step(self, record: StepRecord) -> None:
        from tost.train.metrics import format_line

        fields = format_line(record).partition(" | ")[2]
        self._progress.update(self._task, completed=record.step, description=fields)
