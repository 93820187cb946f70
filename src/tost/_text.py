"""Text for people: suggestions, quantities and tables. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

__all__ = ["Table", "closest", "count", "did_you_mean"]


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

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
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
