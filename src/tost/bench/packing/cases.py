"""What is measured about packed sequences. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Annotated

from tost.bench.harness.benchmark import Benchmark, Option
from tost.bench.ops.cases import Op


class Pass(StrEnum):
    """What is timed."""

    FORWARD = "forward"
    BOTH = "forward + backward"


@dataclass(frozen=True, kw_only=True)
class PackingScale:
    """What is measured, and how long.

    Attributes:
        data: Folder of reviews to train on; None leaves the training out.
        config: What is trained on them, a configuration of `lra_text`.
        sequences: Packed sequences of an operator's call.
        length: Tokens of each.
        repeats: Rounds of each operator.
        steps: Training steps of each side.
        batch_size: Reviews per step.
        max_length: Bytes of a review; longer ones are cut.
    """

    data: Annotated[
        str | None,
        Option(
            "IMDb reviews, as lra/text takes them; without it no training.", metavar="DIR", stored=False, selects=False
        ),
    ] = None
    config: Annotated[str, Option("What is trained on them.", metavar="CONFIG", selects=False)] = "lra/text"
    sequences: Annotated[int, Option("Packed sequences of a call.", metavar="S", least=1)] = 64
    length: Annotated[int, Option("Tokens of each.", metavar="N", least=1)] = 128
    repeats: Annotated[int, Option("Rounds of each operator.", metavar="N", least=3, selects=False)] = 30
    steps: Annotated[int, Option("Training steps of each side.", metavar="N", least=2, selects=False)] = 20
    batch_size: Annotated[int, Option("Reviews per step.", metavar="B", least=1)] = 16
    max_length: Annotated[int, Option("Bytes of a review; longer ones are cut.", metavar="N", least=2)] = 4000

    @classmethod
    def quick(cls) -> PackingScale:
        """Take fewer rounds and steps."""
        return cls(repeats=5, steps=3, batch_size=4, max_length=512)

    @property
    def cases(self) -> list[tuple[Op, Pass]]:
        """The timed calls of the operators."""
        return [*product(Op, Pass)]


_HELP = "Time packed sequences: the operators against one long sequence, training against padding."
_CODE = "tost.bench.packing.run:PackingMeasurement"
BENCHMARK = Benchmark(name="packing", help=_HELP, scale=PackingScale, measurement=_CODE)
