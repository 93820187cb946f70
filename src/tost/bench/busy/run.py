"""How much work slows down beside other busy processes, and on fewer processors than the machine has.

Every case is a process of its own, because how threads wait and how many there are is decided when torch is loaded.
Another busy process on each core leaves half of the machine, so twice the time is fair. What takes longer waits for
threads that are not running. A time is that of all runs of a turn, divided by their number: beside others most short
runs are not interrupted, and a few take many times as long. Places take turns, and a ratio is the median of those
within each turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import tost
from tost._text import Table
from tost.bench.busy.cases import BusyScale, Place, Work
from tost.bench.harness.gate import Check, GateResult
from tost.bench.harness.measurement import Measurement
from tost.bench.harness.memory import keep_freed_memory
from tost.bench.harness.table import cell
from tost.bench.harness.timing import spread
from tost.bench.harness.worker import run_in_process
from tost.testing import relative_rms

BARS = {Place.BUSY: 2.5, Place.SPINNING: 1.0, Place.ONE_CORE: 1.1}
"""Largest accepted ratio of each place; see `ratio`."""

# A busy process that is not one of this package: it has the usual time slices, which it would inherit otherwise.
_OTHER = """
from tost._threads import set_time_slice
set_time_slice(0)
while True: pass
"""
# GNU OpenMP's default, in turns of its loop: some milliseconds.
_SPINNING = {"GOMP_SPINCOUNT": "300000"}


@dataclass(frozen=True, kw_only=True)
class BusyJob:
    """What a process does: some work, for some time, on all its threads or on one."""

    work: Work
    seconds: float
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class BusyTimes:
    """How long the work took, each time, and on how many threads."""

    seconds: list[float]
    threads: int


@dataclass(frozen=True, kw_only=True)
class BusyRow:
    """One case: what ran where and in which turn, seconds per run, how many runs, and threads."""

    work: Work
    place: Place
    seconds: float
    runs: int
    threads: int
    turn: int = 0


@dataclass(kw_only=True)
class BusyResults:
    """All cases that were measured."""

    rows: list[BusyRow] = field(default_factory=list)


class BusyMeasurement(Measurement[BusyScale, BusyResults]):
    """The benchmark `tost bench busy`."""

    results = BusyResults
    heading = "Work on a busy machine"
    checked = "the operator with its reference"

    def check(self) -> GateResult:
        """Compare the kernel with the reference, on several threads."""
        w, t = torch.randn(2, 1024, 8, 48), torch.ones(8)
        error = relative_rms(tost.tssa(w, t), tost.tssa(w, t, backend="reference"))
        return GateResult(checks=(Check(name="tssa", error=error, bound=2e-5),))

    def measure(self, results: BusyResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Time one case after the other, each in its own process."""
        for work, turn, place in self.scale.cases:
            watch(f"{work}: {place.meaning}")
            job = BusyJob(work=work, seconds=self.scale.seconds, threads=1 if place is Place.ONE_THREAD else None)
            with _conditions(place):
                found = run_in_process(run_work, job, label=f"{work}, {place}", inherit_threads=False)
            runs = len(found.seconds)
            mean = sum(found.seconds) / runs
            row = BusyRow(work=work, place=place, seconds=mean, runs=runs, threads=found.threads, turn=turn)
            results.rows.append(row)
            yield f"{work}, {place}: {1e3 * mean:.3g} ms on {row.threads} threads"

    @staticmethod
    def tables(results: BusyResults) -> list[Table]:
        """Return the times and what they are of the same work alone."""
        lines = [
            (
                work,
                cell(_median(_seconds(results, work, Place.ALONE).values()), ".3f", scale=1e3),
                *(_told(ratios(results, work, place)) for place in BARS),
            )
            for work in dict.fromkeys(row.work for row in results.rows)
        ]
        headers = ("work", "alone, ms", "busy / alone", "alone / spinning", "one core / one thread")
        return [Table(title="Beside busy processes", headers=headers, rows=tuple(lines), notes=Place.notes())]

    @staticmethod
    def findings(results: BusyResults) -> list[str]:
        """Return the worst of each ratio."""
        found = []
        for place, bar in BARS.items():
            ratios = {row.work: ratio(results, row.work, place) for row in results.rows}
            known = {work: value for work, value in ratios.items() if value is not None}
            if known:
                worst = max(known, key=lambda work: known[work])
                found.append(f"{place}: at most {known[worst]:.2f} ({worst}); the goal is {bar:g}")
        return found


def ratio(results: BusyResults, work: Work, place: Place) -> float | None:
    """Return how many times as long the work takes as it should; None if that was not measured."""
    return _median(ratios(results, work, place))


def ratios(results: BusyResults, work: Work, place: Place) -> list[float]:
    """Return how many times as long the work takes as it should, in each turn.

    Beside busy processes it is compared with the same work alone, on one core with one thread, and the way in which
    this package lets threads wait with OpenMP's own.
    """
    pairs = {
        Place.BUSY: (Place.BUSY, Place.ALONE),
        Place.SPINNING: (Place.ALONE, Place.SPINNING),
        Place.ONE_CORE: (Place.ONE_CORE, Place.ONE_THREAD),
    }
    above, below = (_seconds(results, work, each) for each in pairs[place])
    return [above[turn] / below[turn] for turn in sorted(above.keys() & below.keys())]


def _seconds(results: BusyResults, work: Work, place: Place) -> dict[int, float]:
    """Return the time of some work in some place by turn."""
    return {row.turn: row.seconds for row in results.rows if (row.work, row.place) == (work, place)}


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return spread(found).median if found else None


def _told(found: list[float]) -> str:
    """Write the median of ratios, with the quartiles if there are several."""
    text = cell(_median(found), ".2f")
    return f"{text} ({spread(found).lower:.2f}-{spread(found).upper:.2f})" if len(found) > 1 else text


@contextmanager
def _conditions(place: Place) -> Iterator[None]:
    """Set what started processes inherit, environment and processors, and keep the machine busy if asked for."""
    cores, variables = sorted(os.sched_getaffinity(0)), dict(os.environ)
    others: list[subprocess.Popen[bytes]] = []
    try:
        if place is Place.SPINNING:
            os.environ.update(_SPINNING)
        if place is Place.ONE_CORE:
            os.sched_setaffinity(0, cores[:1])
        if place is Place.BUSY:
            for core in cores:
                others.append(subprocess.Popen([sys.executable, "-c", _OTHER]))
                os.sched_setaffinity(others[-1].pid, {core})
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(variables)


def run_work(job: BusyJob) -> BusyTimes:
    """Repeat some work for some time; called in a process of its own."""
    keep_freed_memory()  # as everywhere but in a worker; otherwise the time is that of getting pages from the system
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    run = _WORK[job.work]()
    found: list[float] = []
    for _ in range(2):
        run()
    end = time.perf_counter() + job.seconds
    while len(found) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return BusyTimes(seconds=found, threads=torch.get_num_threads())


def _generate(**sizes: Any) -> Callable[[], object]:
    model: Any = tost.create_model("tost_lm_base", position="none", **sizes).eval()
    ids = torch.randint(model.options.vocab_size, (1, 4))
    count = 64 if sizes else 8
    return lambda: tost.generate(model, ids, max_new_tokens=count)


def _train() -> Callable[[], object]:
    model = tost.create_model("tost_lm_base", embed_dim=256, depth=4, num_heads=4, vocab_size=256, max_length=256)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (8, 256))

    def step() -> None:
        model(ids).float().logsumexp(dim=-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _tssa() -> Callable[[], object]:
    w, t = torch.randn(1, 4096, 8, 48), torch.ones(8)
    return lambda: tost.tssa(w, t)


_WORK: dict[Work, Callable[[], Callable[[], object]]] = {
    Work.GENERATE_TINY: lambda: _generate(embed_dim=64, depth=2, num_heads=4, vocab_size=256),
    Work.GENERATE_BASE: _generate,
    Work.TRAIN: _train,
    Work.TSSA: _tssa,
}
