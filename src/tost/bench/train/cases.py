"""What is measured about the training engine. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tost.bench.harness.benchmark import Benchmark, Option


@dataclass(frozen=True, kw_only=True)
class TrainScale:
    """What both sides train, and how often.

    Attributes:
        config: Built-in configuration or YAML file.
        overrides: Changes to it.
        repeats: Timed stretches of each side.
    """

    config: Annotated[str, Option("What to train meanwhile.", argument=True, selects=False)] = "demo/stdlib_bytes"
    overrides: Annotated[
        tuple[str, ...], Option("Changes to it, such as train.batch_size=8.", argument=True, selects=False)
    ] = ()
    repeats: Annotated[int, Option("Timed stretches of each side.", metavar="N", least=3, selects=False)] = 7


_HELP = "Time the training engine against a bare loop that takes the same steps."
_CODE = "tost.bench.train.run:TrainMeasurement"
BENCHMARK = Benchmark(name="train", help=_HELP, scale=TrainScale, measurement=_CODE)
