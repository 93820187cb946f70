"""Tables of text made from measurements; the terminal and the Markdown report show the same ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tost.bench.harness.timing import Spread
from tost.bench.ops.cases import Case, Mode, Op
from tost.bench.ops.contenders import CONTENDERS, LIMIT
from tost.bench.ops.run import KeptRow, Measurements, Row

__all__ = ["Growth", "Table", "all_tables", "brief_tables", "growth", "growth_table", "markdown_table", "ratio_table"]

_GROWTH_FROM_TOKENS = 4096
_MISSING = "-"
_AnyRow = TypeVar("_AnyRow", Row, KeptRow)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table of text; the first `labels` columns say what a row is about, the others hold numbers."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Time per token of one contender at two lengths."""

    op: Op
    mode: Mode
    contender: str
    from_tokens: int
    to_tokens: int
    from_seconds_per_token: float
    to_seconds_per_token: float

    @property
    def factor(self) -> float:
        """1 for linear cost; the ratio of the lengths for quadratic cost."""
        return self.to_seconds_per_token / self.from_seconds_per_token


def brief_tables(measurements: Measurements) -> list[Table]:
    """Return what fits on a terminal: ratios, memory of the operators, growth. Empty tables are left out."""
    built = [ratio_table(measurements.rows), _operator_memory_table(measurements.kept), growth_table(measurements.rows)]
    return [table for table in built if table.rows]


def all_tables(measurements: Measurements) -> list[Table]:
    """Return every table of a report. Empty ones are left out."""
    built = [
        ratio_table(measurements.rows),
        growth_table(measurements.rows),
        _operator_memory_table(measurements.kept),
        _layer_memory_table(measurements.rows),
        _time_table(measurements.rows),
    ]
    return [table for table in built if table.rows]


def growth(rows: Iterable[Row]) -> list[Growth]:
    """Compare the time per token at the longest length with that at 4,096 tokens (or the shortest length measured).

    Args:
        rows: Rows of a measurement; only single sequences are used.

    Returns:
        One entry per operator, pass and contender that was measured at two lengths or more.
    """
    groups: dict[tuple[object, ...], dict[int, Row]] = {}
    for row in rows:
        case = row.case
        if case.batch == 1 and row.seconds is not None:
            key = (case.op, case.mode, case.width, case.heads, case.dtype, row.contender)
            groups.setdefault(key, {})[case.tokens] = row
    found = []
    for by_tokens in groups.values():
        start = _GROWTH_FROM_TOKENS if _GROWTH_FROM_TOKENS in by_tokens else min(by_tokens)
        end = max(by_tokens)
        if start < end:
            case = by_tokens[end].case
            found.append(
                Growth(
                    op=case.op,
                    mode=case.mode,
                    contender=by_tokens[end].contender,
                    from_tokens=start,
                    to_tokens=end,
                    from_seconds_per_token=_seconds_per_token(by_tokens[start]),
                    to_seconds_per_token=_seconds_per_token(by_tokens[end]),
                )
            )
    return found


def ratio_table(rows: Sequence[Row]) -> Table:
    """Return the main table: the limit in milliseconds, every contender as a multiple of it."""

    def cell(row: Row) -> str:
        if row.ratio is None or row.seconds is None:
            return _MISSING
        if row.contender == LIMIT:
            return f"{_milliseconds(row.seconds.median)} ms"
        return _ratio(row.ratio) if row.contender == "tost" else _short(row.ratio.median)

    notes = tuple(f"{row.case.label}, {row.contender}: {row.note}" for row in rows if row.note)
    return replace(_case_table("Time relative to the limit", rows, cell), notes=notes)


def growth_table(rows: Iterable[Row]) -> Table:
    """Return how the time per token grows with the length, one column per contender."""
    found = growth(rows)
    names = _present({item.contender for item in found})
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for item in found:
        key = (item.op, item.mode, f"{item.from_tokens} to {item.to_tokens}")
        groups.setdefault(key, {})[item.contender] = _short(item.factor)
    return Table(
        title="Growth of the time per token (1 is linear cost)",
        headers=("op", "pass", "tokens", *names),
        rows=tuple((*key, *(cells.get(name, _MISSING) for name in names)) for key, cells in groups.items()),
        labels=3,
    )


def _time_table(rows: Sequence[Row]) -> Table:
    def cell(row: Row) -> str:
        if row.seconds is None:
            return _MISSING
        seconds = row.seconds
        low, high = _milliseconds(seconds.lower), _milliseconds(seconds.upper)
        return f"{_milliseconds(seconds.median)} ({low}-{high})"

    return _case_table("Milliseconds of one run", rows, cell)


def _layer_memory_table(rows: Sequence[Row]) -> Table:
    kept = [row for row in rows if row.kept is not None]
    return _case_table("Megabytes kept for the backward pass by the layer", kept, lambda row: _megabytes(row.kept))


def _operator_memory_table(rows: Sequence[KeptRow]) -> Table:
    names = tuple(dict.fromkeys(row.implementation for row in rows))
    lines = []
    for case, group in _by_case(rows).items():
        cells = {row.implementation: f"{_megabytes(row.bytes)} ({row.bytes / row.input_bytes:.1f}x)" for row in group}
        label = (case.op, f"{case.width}/{case.heads}", f"{case.batch}x{case.tokens}")
        lines.append((*label, _megabytes(group[0].input_bytes), *(cells.get(name, _MISSING) for name in names)))
    return Table(
        title="Megabytes kept for the backward pass by the operator alone (times its input)",
        headers=("op", "d/H", "tokens", "input", *names),
        rows=tuple(lines),
        labels=3,
    )


def _case_table(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> Table:
    """Lay out one line per case and one column per contender that appears."""
    names = _present({row.contender for row in rows})
    lines = []
    for case, group in _by_case(rows).items():
        cells = {row.contender: cell(row) for row in group}
        label = (case.op, f"{case.width}/{case.heads}", case.mode, f"{case.batch}x{case.tokens}")
        lines.append((*label, *(cells.get(name, _MISSING) for name in names)))
    return Table(title=title, headers=("op", "d/H", "pass", "tokens", *names), rows=tuple(lines), labels=4)


def _present(names: Collection[str]) -> tuple[str, ...]:
    """Return the given contenders in their usual order."""
    return tuple(contender.name for contender in CONTENDERS if contender.name in names)


def _by_case(rows: Iterable[_AnyRow]) -> dict[Case, list[_AnyRow]]:
    groups: dict[Case, list[_AnyRow]] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return groups


def _seconds_per_token(row: Row) -> float:
    assert row.seconds is not None
    return row.seconds.median / row.case.tokens


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _megabytes(count: int | None) -> str:
    return _MISSING if count is None else f"{count / 1e6:.1f}"


def _short(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def _ratio(ratio: Spread) -> str:
    return f"{_short(ratio.median)} ({_short(ratio.lower)}-{_short(ratio.upper)})"


def markdown_table(table: Table) -> list[str]:
    """Return the lines of a table in Markdown, without its title and notes."""
    rule = ["---" if column < table.labels else "---:" for column in range(len(table.headers))]
    return [f"| {' | '.join(cells)} |" for cells in (table.headers, rule, *table.rows)]
