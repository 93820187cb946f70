"""Progress of long work: a line at least every ten seconds, with the remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable

Report = Callable[[int, int], None]
"""Receives how many steps of some work are done, and how many there are."""

SECONDS = 10.0
"""Longest silence of a job that is at work."""


class Pace:
    """Says when a line is due.

    Args:
        seconds: Between two lines.
        clock: Monotonic seconds; replaced in tests.
    """

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._began = self._last = clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def said(self) -> None:
        """Note that there was a line just now."""
        self._last = self._clock()

    def due(self) -> bool:
        """Whether the last line is long ago; if so, this counts as the next."""
        if self._clock() - self._last < self._seconds:
            return False
        self.said()
        return True


def silent(done: int, total: int) -> None:
    """Ignore progress."""


def format_duration(seconds: float) -> str:
    """Write a duration as ``41s``, ``12m04s`` or ``3h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def format_progress(what: str, done: int, total: int, seconds: float) -> str:
    """Write how far work is, ``what: 3 of 4 (75%), eta 12s``, and without a number of steps how long it has taken.

    Args:
        what: The work; may be empty.
        done: Steps that are done.
        total: All steps; 0 if that is not known.
        seconds: What those that are done took.
    """
    name = f"{what}: " if what else ""
    if not total:
        return f"{name}{format_duration(seconds)} so far"
    left = f"eta {format_duration(seconds / done * (total - done))}" if done else f"{format_duration(seconds)} so far"
    return f"{name}{done:,} of {total:,} ({done / total:.0%}), {left}"
