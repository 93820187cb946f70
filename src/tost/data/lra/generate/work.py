"""Work in independent units, by this process or by several, that can be stopped at any time."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from tost.errors import StorageError

__all__ = ["do_all", "written_at_once"]

Unit = TypeVar("Unit")


def do_all(work: Callable[[Unit], None], units: Sequence[Unit], workers: int, done: Callable[[Unit], None]) -> None:
    """Do units of work, in any order.

    Args:
        work: A function of a module, which other processes can find.
        units: What it is called with, each once.
        workers: Processes.
        done: Called in this process after each unit.

    Raises:
        StorageError: A process was killed.
    """
    if min(workers, len(units)) <= 1:
        for unit in units:
            work(unit)
            done(unit)
        return
    # Not forked: this process may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(units)), context, _ignore_interrupts) as pool:
        running = {pool.submit(work, unit): unit for unit in units}
        try:
            for future in as_completed(running):
                future.result()
                done(running[future])
        except BrokenProcessPool as error:
            raise StorageError(
                "a process was killed, perhaps for lack of memory; what is done is kept: give the same command again, "
                "with fewer --workers if need be."
            ) from error
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides what an interrupt means


@contextmanager
def written_at_once(path: Path) -> Iterator[BinaryIO]:
    """Open a file that has its name only once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")  # one that a killed process left behind is written over
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
