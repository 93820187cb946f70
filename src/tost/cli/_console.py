"""Output of the commands: results on stdout, everything else on stderr; rich on a terminal, plain text elsewhere.

Colour follows ``NO_COLOR`` and the terminal, which is rich's own rule. Rich is imported only where something rich is
drawn, because it would double the time of ``tost --help`` in a pipe.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tost._progress import Pace, format_progress
from tost._text import Table, log_line, printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

log = log_line
"""Writes a line to stderr."""


def show(text: str = "") -> None:
    """Write a line of results to stdout, without control characters, which may come from a file."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def show_json(content: dict[str, object]) -> None:
    """Write an object as one line of JSON to stdout; the last output of a command with ``--json``."""
    show(json.dumps(content, allow_nan=False))


def is_live() -> bool:
    """Return whether stderr can be drawn on: a terminal, and not the one that a notebook pretends to be."""
    return sys.stderr.isatty() and "JPY_PARENT_PID" not in os.environ


def is_first() -> bool:
    """Return whether this is the process that writes output."""
    return os.environ.get("RANK", "0") == "0"


def show_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", labels: int | None = None
) -> None:
    """Write a table to stdout; the first `labels` columns hold words (all by default), the others numbers."""
    print_table(Table(headers=headers, rows=rows, title=title, labels=len(headers) if labels is None else labels))


def print_table(table: Table) -> None:
    """Write a table with its title to stdout, and an empty line after it.

    On a terminal it is drawn; in a pipe its cells are padded and separated by tabs, for eyes and ``cut``.
    """
    if not sys.stdout.isatty():
        for line in [*filter(None, [table.title]), *table.plain(), ""]:
            show(line)
        return
    from rich import box
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text

    # The title is printed apart: inside, it would be wrapped to the width of a narrow table.
    console = Console(highlight=False)
    if table.title:
        console.print(Text(printable(table.title), style="bold"))
    drawn = rich_table.Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column, header in enumerate(table.headers):
        drawn.add_column(header, justify="left" if column < table.labels else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))  # as a str, square brackets would be markup
    console.print(drawn)
    show()


def show_entries(entries: Sequence[Mapping[str, str]]) -> None:
    """Write a list to stdout: a table on a terminal, one line per entry with tabs between its columns in a pipe."""
    if sys.stdout.isatty():
        show_table(list(entries[0]), [list(entry.values()) for entry in entries])
    else:
        for entry in entries:
            show("\t".join(entry.values()))


@contextmanager
def progress(total: int = 0) -> Iterator[Progress]:
    """Report progress on stderr: a live bar on a terminal, elsewhere lines, at least one every ten seconds.

    Args:
        total: Number of steps, if it is known before.

    Yields:
        Receives the progress.
    """
    if is_live():
        with live_bars(transient=True) as bars:
            yield _LiveProgress(total, bars)
        return
    shown, ended = Progress(total), threading.Event()

    def beat() -> None:
        while not ended.wait(1.0):
            shown.beat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield shown
    finally:
        ended.set()
        thread.join()


@contextmanager
def live_bars(*, transient: bool = False) -> Iterator[Bars]:
    """Draw progress bars on stderr, which is a terminal; `transient` removes them at the end."""
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    text = rich.TextColumn("{task.description}", markup=False)
    with rich.Progress(*columns, text, console=Console(stderr=True), transient=transient) as bars:
        yield bars


def print_above(bars: Bars, text: str) -> None:
    """Write a line above live bars."""
    bars.console.print(printable(text), markup=False, highlight=False)


class Progress:
    """Progress of work as lines: either counted, with `update`, or in named steps, with `start` and `finish`."""

    def __init__(self, total: int = 0) -> None:
        self._pace = Pace()
        self._done, self._total, self._name, self._first = 0, total, "", 0

    def update(self, done: int, total: int, what: str = "") -> None:
        """Report a count; a change of the first word of `what` gets a line at once."""
        if what.partition(" ")[0] != self._name.partition(" ")[0]:
            self._pace, self._first = Pace(), done
            log(f"{what}: {done:,} of {total:,}")
        self._done, self._total, self._name = done, total, what

    def start(self, name: str) -> None:
        """Begin a step."""
        self._name = name

    def finish(self, result: str) -> None:
        """End the current step with one line about its result."""
        self._done += 1
        log(f"[{self._done}/{self._total}] {self._name}: {result}")
        self._pace.said()

    def note(self, line: str) -> None:
        """Begin a step of unknown number with a line."""
        log(line)
        self._name = line
        self._pace.said()

    def beat(self) -> None:
        """Write a line, unless there was one recently."""
        if self._pace.due():
            # Steps of an earlier run of the same command took none of this time.
            done, total = self._done - self._first, self._total - self._first
            log(f"{self._name or 'at work'}: {format_progress('', done, total, self._pace.elapsed)}")


class _LiveProgress(Progress):
    """The same as a bar."""

    def __init__(self, total: int, bars: Bars) -> None:
        super().__init__(total)
        self._bars, self._task = bars, bars.add_task("", total=total or None)

    def update(self, done: int, total: int, what: str = "") -> None:
        self._bars.update(self._task, completed=done, total=total, description=printable(what))

    def start(self, name: str) -> None:
        self._bars.update(self._task, description=printable(name))

    def finish(self, result: str) -> None:
        self._bars.update(self._task, advance=1)

    def note(self, line: str) -> None:
        print_above(self._bars, line)
