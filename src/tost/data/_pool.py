"""Work that several processes share and that can be stopped at any time."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tost.data.prepare import Report
from tost.errors import StorageError


def share_work(
    function: Callable[[Any], None], units: Sequence[Any], *, workers: int, report: Report, total: int, what: str
) -> None:
    """Call a function for every unit of work, in any order.

    Args:
        function: Function of a module, which other processes can find.
        units: Units of work, whose attribute ``size`` is their number of items.
        workers: Number of processes; with one, this process does the work.
        report: Progress callback, after every unit.
        total: Number of items, those that were done before included.
        what: Name of the items, for the progress.

    Raises:
        StorageError: A process was killed.
    """
    done = total - sum(unit.size for unit in units)
    report(done, total, what)
    if workers == 1 or len(units) < 2:
        for unit in units:
            function(unit)
            done += unit.size
            report(done, total, what)
        return
    # Not forked: this process may have threads.
    processes = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(units)), processes, _ignore_interrupts)
    try:
        waiting = {pool.submit(function, unit): unit for unit in units}
        for future in as_completed(waiting):
            future.result()
            done += waiting[future].size
            report(done, total, what)
    except BrokenProcessPool as error:
        raise StorageError(
            "a process was killed, perhaps for lack of memory; what is done is kept: run the same command again, with "
            "fewer --workers if need be."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one stops the others
