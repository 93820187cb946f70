"""Stopping on request: the first Ctrl-C or SIGTERM lets the step finish and saves, a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

GRACE_SECONDS = 0.5
"""Signals that follow the first one so soon are the same wish: a launcher passes on what the terminal sent to all."""


class StopRequest:
    """Records signals for the duration of a ``with`` block.

    Attributes:
        requested: Whether a signal has asked the process to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python does not let us
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
        elif number == signal.SIGINT and now - self._since > GRACE_SECONDS:
            raise KeyboardInterrupt
