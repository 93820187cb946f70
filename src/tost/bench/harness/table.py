"""Cells and tables of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tost._text import Table
from tost.bench.harness.timing import Spread

MISSING = "-"

Row = TypeVar("Row")


def cell(value: float | None, form: str = "", *, scale: float = 1.0) -> str:
    """Return a number as text, such as ``cell(seconds, ".1f", scale=1e3)``; a missing one is a dash."""
    return MISSING if value is None else format(scale * value, form)


def short(value: float | None) -> str:
    """Return a number in about three digits."""
    return MISSING if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_quartiles(value: Spread | None, show: Callable[[float], str] = "{:.2f}".format) -> str:
    """Return a median with its quartiles in brackets; a single value has none."""
    if value is None:
        return MISSING
    if value.count == 1:
        return show(value.median)
    return f"{show(value.median)} ({show(value.lower)}-{show(value.upper)})"


def columns(
    title: str,
    rows: Sequence[Row],
    cells: Iterable[tuple[str, Callable[[Row], str]]],
    *,
    labels: int = 1,
    notes: Iterable[str] = (),
) -> Table:
    """Return a table with one line per row.

    Args:
        title: Line above the table.
        rows: Measurements.
        cells: Titles of the columns, and what makes the text of their cells.
        labels: How many columns on the left hold words.
        notes: Lines below the table.
    """
    headers, texts = zip(*cells, strict=True)
    lines = tuple(tuple(text(row) for text in texts) for row in rows)
    return Table(title=title, headers=headers, rows=lines, labels=labels, notes=tuple(notes))


def pivot(
    title: str,
    headers: Sequence[str],
    cells: Iterable[tuple[tuple[str, ...], str, str]],
    *,
    order: Sequence[str] | None = None,
    labels: int | None = None,
    notes: Iterable[str] = (),
) -> Table:
    """Return a table with one line per label and one column per name.

    Args:
        title: Line above the table.
        headers: Titles of the columns on the left.
        cells: Label of the line, name of the column, and text.
        order: Names of the columns in order; None takes them as they come.
        labels: How many columns hold words; None for those on the left.
        notes: Lines below the table.
    """
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    found: dict[str, None] = {}
    for label, name, text in cells:
        lines.setdefault(label, {})[name] = text
        found[name] = None
    shown = [name for name in order if name in found] if order is not None else list(found)
    return Table(
        title=title,
        headers=(*headers, *shown),
        rows=tuple((*label, *(line.get(name, MISSING) for name in shown)) for label, line in lines.items()),
        labels=len(headers) if labels is None else labels,
        notes=tuple(notes),
    )


def without_empty(tables: Iterable[Table]) -> list[Table]:
    """Return the tables that have a number in them."""
    return [table for table in tables if any(text != MISSING for row in table.rows for text in row[table.labels :])]
