"""What is measured beside other busy processes. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from tost.bench.harness.benchmark import Benchmark, Choice, Option


class Work(StrEnum):
    """What runs."""

    GENERATE_TINY = "generate-tiny"
    GENERATE_BASE = "generate-base"
    TRAIN = "train"
    TSSA = "tssa"


class Place(Choice):
    """What else the machine does, and how much of it there is."""

    ALONE = "alone", "nothing else runs"
    SPINNING = "spinning", "nothing else runs, and threads wait as OpenMP has it: by spinning"
    BUSY = "busy", "one other process per core never rests"
    ONE_CORE = "one-core", "the process may use one core, as with `taskset -c 0`, and knows it"
    ONE_THREAD = "one-thread", "the process uses one thread and may use every core"


@dataclass(frozen=True, kw_only=True)
class BusyScale:
    """What is measured, and how long.

    Attributes:
        work: What runs.
        turns: How often each place has its turn with a piece of work. What changes on the machine in the meantime
            reaches all places alike.
        seconds: Time for each piece of work in each place and turn, without starting and warming up.
    """

    work: Annotated[tuple[Work, ...], Option("What runs; can be repeated.")] = tuple(Work)
    turns: Annotated[int, Option("How often each place has its turn.", metavar="N", least=1, selects=False)] = 5
    seconds: Annotated[float, Option("Time for each case.", metavar="S", least=0.1, selects=False)] = 2.0

    @classmethod
    def quick(cls) -> BusyScale:
        """Measure the small model and the operator only."""
        return cls(work=(Work.GENERATE_TINY, Work.TSSA), turns=1, seconds=1.0)

    @property
    def cases(self) -> list[tuple[Work, int, Place]]:
        """What runs in which turn and where, in the order of the measurement."""
        return [(work, turn, place) for work in self.work for turn in range(self.turns) for place in Place]


_HELP = "Time work beside busy processes and on one core, against the same work alone."
_CODE = "tost.bench.busy.run:BusyMeasurement"
BENCHMARK = Benchmark(name="busy", help=_HELP, scale=BusyScale, measurement=_CODE)
