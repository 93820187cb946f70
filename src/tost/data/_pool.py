"""Work that several processes share and that can be stopped at any time."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tost.data.prepare import Report
from tost.errors import StorageError

Unit = TypeVar("Unit")

Tick = Callable[[int], None]
"""Called by the work with the number of items done since the last call."""


class WorkerPool:
    """Processes that share work; with one worker, this process does it.

    Args:
        workers: Number of processes.
    """

    def __init__(self, workers: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            # Not forked: this process may have threads.
            self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _ignore_interrupts)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(
        self,
        function: Callable[..., Any],
        units: Sequence[Unit],
        *,
        report: Report,
        total: int,
        what: str,
        done: int = 0,
    ) -> Iterator[tuple[Unit, Any]]:
        """Call ``function(unit, tick)`` for every unit, in any order.

        Args:
            function: Function of a module, which other processes can find.
            units: Units of work.
            report: Progress callback, after every unit.
            total: Number of items, for the progress.
            what: Name of the items, for the progress.
            done: Items that were done before.

        Yields:
            Each unit with the result of its call.

        Raises:
            StorageError: A process was killed.
        """
        report(done, total, what)
        if self._pool is None:
            results = ((unit, _call(function, unit)) for unit in units)
        else:
            waiting = {self._pool.submit(_call, function, unit): unit for unit in units}
            results = ((waiting[future], future.result()) for future in as_completed(waiting))
        try:
            for unit, (result, count) in results:
                done += count
                report(min(done, total), total, what)
                yield unit, result
        except BrokenProcessPool as error:
            raise StorageError(
                "a process was killed, perhaps for lack of memory; what is done is kept: run the same command again, "
                "with fewer --workers if need be."
            ) from error


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one stops the others


def _call(function: Callable[..., Any], unit: Any) -> tuple[Any, int]:
    counts: list[int] = []
    return function(unit, counts.append), sum(counts)
