"""Work that several processes share and that can be stopped at any time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tost.data.prepare import Report
from tost.errors import StorageError

Unit = TypeVar("Unit")

Tick = Callable[[int], None]
"""Called by a worker with the number of items done since the last call; raises if the work is to stop."""


class _StoppedError(Exception):
    """The work was stopped by the first process."""


class WorkerPool:
    """Processes that share work; with one worker, this process does it.

    Args:
        workers: Number of processes.
        context: Further arguments of every call, sent to each process once.
    """

    def __init__(self, workers: int, *context: Any) -> None:
        self._context = context
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            # Not forked: this process may have threads, those of the tokenizers library among others.
            processes = multiprocessing.get_context("spawn")
            self._stop, self._done = processes.Event(), processes.Value("q", 0)
            self._pool = ProcessPoolExecutor(workers, processes, _start_worker, (context, self._stop, self._done))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._pool is not None:
            if kind is not None:
                self._stop.set()
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
        """Call ``function(unit, *context, tick)`` for every unit, in any order.

        Args:
            function: Function of a module, which other processes can find.
            units: Units of work.
            report: Receives the progress that the function announces by `Tick`.
            total: Number of items, for the progress.
            what: What the items are, for the progress.
            done: Items that were done before.

        Yields:
            Each unit with the result of its call.

        Raises:
            StorageError: A process was killed.
        """

        def show(count: int) -> None:
            report(min(done + count, total), total, what)

        show(0)
        if self._pool is None:
            counted = 0

            def tick(count: int) -> None:
                nonlocal counted
                counted += count
                show(counted)

            for unit in units:
                yield unit, function(unit, *self._context, tick)
            return
        self._done.value = 0
        waiting = {self._pool.submit(_call, function, unit): unit for unit in units}
        while waiting:
            ended, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            show(self._done.value)
            for future in ended:
                try:
                    result = future.result()
                except BrokenProcessPool as error:
                    raise StorageError(
                        "a process was killed, perhaps for lack of memory; what is done is kept: run the same command "
                        "again, with fewer --workers if need be."
                    ) from error
                yield waiting.pop(future), result


_worker: tuple[Any, ...] = ()  # what a process keeps between the units that it is given


def _start_worker(context: tuple[Any, ...], stop: Any, done: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one stops the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    _worker = (context, stop, done)


def _call(function: Callable[..., Any], unit: Any) -> Any:
    context, stop, done = _worker

    def tick(count: int) -> None:
        if stop.is_set():
            raise _StoppedError
        with done.get_lock():
            done.value += count

    return function(unit, *context, tick)
