"""Text for people: suggestions, quantities and tables. Loads no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from typing import TypeVar

Key = TypeVar("Key")
Row = TypeVar("Row")

UNKNOWN = "–"  # noqa: RUF001 - a dash in a cell, not a minus

# Control characters could recolour a terminal, or worse; their pictures cannot. The second control block and marks that
# change the direction of a line have no pictures.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = _PICTURES | dict.fromkeys([*range(0x80, 0xA0), *_DIRECTIONS, 0x2028, 0x2029, *range(0xD800, 0xE000)], 0xFFFD)


def printable(text: str) -> str:
    """Return text from anywhere as a terminal may show it: control characters and marks of direction are replaced.

    Line breaks and tabs stay. So does every letter of every script.
    """
    return text.translate(_SHOWN)


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known word most similar to `word`, or None if none is similar."""
    found = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``"did you mean 'x'? "`` for the closest known word, or an empty string.

    It is meant to be put in front of the next sentence: ``f"no model {name!r}; {did_you_mean(...)}the models are ..."``
    """
    found = closest(word, known, cutoff=cutoff)
    return f"did you mean {found!r}? " if found else ""


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as ``"1 thread"`` or ``"2 threads"``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def integers(text: str) -> tuple[int, ...] | None:
    """Read whole numbers with commas between them; None if the text is something else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return None


def real(value: object) -> float | None:
    """Return a measured number as a float; None for everything else, such as text, booleans, infinity and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Beyond that even writing it in another unit overflows.
    return float(value) if -1e300 < value < 1e300 else None


def number(value: object, digits: int = 4) -> str:
    """Write an integer in full and another number with so many significant digits; a dash for anything else."""
    found = real(value)
    if found is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) and abs(found) < 1e15 else f"{found:.{digits}g}"


def _written(value: object, write: Callable[[float], str]) -> str:
    found = real(value)
    return UNKNOWN if found is None else write(found)


def rounded(value: object) -> str:
    """Write a large whole number: ``12,345`` or ``1.23 million``."""
    return _written(value, lambda found: f"{found / 1e6:.2f} million" if found >= 1e6 else f"{found:,.0f}")


def percent(value: object) -> str:
    """Write a share of 1 in per cent: ``93.8 %``."""
    return _written(value, lambda found: f"{100 * found:.1f} %")


def byte_size(value: object) -> str:
    """Write an amount of memory: ``12.3 MB`` or ``1.25 GB``."""
    return _written(value, lambda found: f"{found / 1e9:.2f} GB" if found >= 1e9 else f"{found / 1e6:.1f} MB")


def duration(seconds: object) -> str:
    """Write a time: ``950 µs``, ``8.1 ms``, ``41 s``, ``12 min 4 s`` or ``3 h 20 min``."""
    found = real(seconds)
    if found is None or found < 0:
        return UNKNOWN
    if found < 1:
        return f"{1e6 * found:.3g} µs" if found < 1e-3 else f"{1e3 * found:.3g} ms"
    whole = round(found)
    if whole < 60:
        return f"{found:.3g} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def log_line(text: str) -> None:
    """Write a line about what is going on to stderr, without control characters, which may come from a file."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def html_card(title: str, entries: Mapping[str, object]) -> str:
    """Return names and values as a small table in HTML, as notebooks show results."""
    left = 'style="text-align:left"'
    rows = "".join(
        f"<tr><th {left}>{escape(str(name))}</th><td {left}>{escape(str(value))}</td></tr>"
        for name, value in entries.items()
    )
    return f"<table><caption><b>{escape(title)}</b></caption>{rows}</table>"


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Return the rows by a key, both in the order in which they come."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text.

    Attributes:
        headers: Column titles.
        rows: Cells.
        title: Line above the table.
        labels: Number of columns on the left that hold words; the others hold numbers and are aligned to the right.
        notes: Lines below the table.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    labels: int = 1
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return the table in Markdown, without its title and notes."""
        rule = ["---" if column < self.labels else "---:" for column in range(len(self.headers))]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.headers, rule, *self.rows))

    def plain(self) -> Iterator[str]:
        """Yield lines of padded cells that are separated by tabs, the headers first."""
        lines: list[Sequence[str]] = [self.headers, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [
                cell.ljust(width) if column < self.labels else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            yield "\t".join(cells).rstrip()
