"""Output of the commands: results on stdout, everything else on stderr; rich on a terminal, plain text elsewhere.

Colour follows ``NO_COLOR`` and the terminal, which is rich's own rule. Rich is imported only where something rich is
drawn, because it would double the time of ``tost --help`` in a pipe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tost._text import Table, printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def show(text: str = "") -> None:
    """Write a line of results to stdout; on a terminal without control characters, which may come from a file."""
    sys.stdout.write(f"{printable(text) if sys.stdout.isatty() else text}\n")
    sys.stdout.flush()


def show_json(content: dict[str, object]) -> None:
    """Write an object as one line of JSON to stdout; the last thing a command with ``--json`` does."""
    show(json.dumps(content, allow_nan=False))


def log(text: str) -> None:
    """Write a line about what is going on to stderr, without control characters, which may come from a file."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def show_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, labels: int | None = None
) -> None:
    """Write a table of text to stdout; see `print_table`.

    Args:
        headers: Column titles.
        rows: Cells.
        title: Line above the table.
        labels: Number of columns on the left that hold words; the others hold numbers and are aligned to the right.
            None for words only.
    """
    print_table(Table(headers=headers, rows=rows, title=title or "", labels=len(headers) if labels is None else labels))


def print_table(table: Table) -> None:
    """Write a table with its title to stdout, and an empty line after it.

    On a terminal it is drawn; in a pipe its cells are padded and separated by tabs, to be read by eye or by ``cut``.
    """
    if sys.stdout.isatty():
        _draw_table(table)
    else:
        for line in [*filter(None, [table.title]), *table.plain()]:
            show(line)
    show()


def show_entries(entries: Sequence[Mapping[str, str]]) -> None:
    """Write a list to stdout: a table on a terminal, one line per entry with tabs between its columns in a pipe."""
    if sys.stdout.isatty():
        show_table(list(entries[0]), [list(entry.values()) for entry in entries])
    else:
        for entry in entries:
            show("\t".join(entry.values()))


@contextmanager
def steps(total: int) -> Iterator[Steps]:
    """Report progress on stderr: a live bar on a terminal, one line per finished step elsewhere.

    Args:
        total: Number of steps.

    Yields:
        Receives the steps.
    """
    if not sys.stderr.isatty():
        yield Steps(total)
        return
    with live_bars("spinner", "bar", "count", "elapsed", "description", transient=True) as progress:
        yield _LiveSteps(progress, progress.add_task("", total=total))


@contextmanager
def live_bars(*columns: str, transient: bool = False) -> Iterator[Progress]:
    """Draw progress bars on stderr, which is a terminal.

    Args:
        *columns: ``spinner``, ``bar``, ``count``, ``elapsed``, ``remaining``, or an attribute of the tasks as text.
        transient: Remove the bars at the end.

    Yields:
        Takes tasks and updates.
    """
    from rich import progress as rich
    from rich.console import Console

    drawn = {"spinner": rich.SpinnerColumn, "bar": rich.BarColumn, "count": rich.MofNCompleteColumn}
    drawn |= {"elapsed": rich.TimeElapsedColumn, "remaining": rich.TimeRemainingColumn}
    made = [drawn[name]() if name in drawn else rich.TextColumn(f"{{task.{name}}}", markup=False) for name in columns]
    with rich.Progress(*made, console=Console(stderr=True), transient=transient) as progress:
        yield progress


class Steps:
    """Progress of work that consists of a known number of steps."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._name = total, 0, ""

    def start(self, name: str) -> None:
        """A step begins."""
        self._name = name

    def finish(self, result: str) -> None:
        """The step that began last is done; `result` sums it up in one line."""
        self._done += 1
        log(f"[{self._done}/{self._total}] {self._name}: {result}")


class _LiveSteps(Steps):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def start(self, name: str) -> None:
        self._progress.update(self._task, description=printable(name))

    def finish(self, result: str) -> None:
        self._progress.update(self._task, advance=1)


def _draw_table(table: Table) -> None:
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
        # Text, not str: a reason may contain square brackets, which rich would take for markup.
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    console.print(drawn)
