"""What is measured about language models at work, and how much of it. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from tost.bench.harness.benchmark import Benchmark, Option
from tost.errors import ConfigError


class Part(StrEnum):
    """What can be measured."""

    PREFILL = "prefill"
    DECODE = "decode"
    BATCH = "batch"
    TRAIN = "train"
    QUALITY = "quality"


@dataclass(frozen=True, kw_only=True)
class GenerateScale:
    """How much is measured.

    Attributes:
        part: What to measure.
        contexts: Tokens that came before a timed one.
        baseline_contexts: The same for GPT-2, whose cost grows with them.
        prompt: Tokens of the prompt in the part prefill.
        train_tokens: Lengths of the texts of training steps.
        batches: Texts at a time.
        repeats: Timed tokens of each contender and case.
        rounds: Timed prompts and training steps of each contender and case.
        depth: Layers of all models.
        vocab_size: Ids of all models; None for their own.
        source: A run, a checkpoint or a model folder, for the part quality.
        text: A file that this model has not been trained on.

    Raises:
        ConfigError: The part quality lacks its model or its text.
    """

    part: Annotated[tuple[Part, ...], Option("What; repeat for more.", default="all", stored=False)] = tuple(Part)
    contexts: tuple[int, ...] = (128, 1024, 8192, 65_536)
    baseline_contexts: tuple[int, ...] = (1024, 8192)
    prompt: int = 8192
    train_tokens: tuple[int, ...] = (4096, 8192)
    batches: tuple[int, ...] = (1, 8)
    repeats: Annotated[int, Option("Timed tokens of each.", metavar="N", least=3, selects=False)] = 40
    rounds: Annotated[int, Option("Timed prompts and steps.", metavar="N", least=1, selects=False)] = 2
    depth: int = 12
    vocab_size: int | None = None
    source: Annotated[
        Path | None, Option("A trained model, for the part quality.", metavar="RUN|MODEL", selects=False, stored=False)
    ] = None
    text: Annotated[
        Path | None, Option("A text that it has not seen.", metavar="FILE", selects=False, stored=False)
    ] = None

    def __post_init__(self) -> None:
        if (self.source is None) != (self.text is None) or (self.part == (Part.QUALITY,) and self.source is None):
            raise ConfigError("the part quality takes a trained model and a text: --source RUN --text FILE.")

    @classmethod
    def quick(cls) -> GenerateScale:
        """Two layers, short texts: a demonstration."""
        return cls(
            contexts=(64, 512),
            baseline_contexts=(64, 512),
            prompt=512,
            train_tokens=(256,),
            repeats=5,
            rounds=1,
            depth=2,
            vocab_size=4096,
        )


_HELP = "Time language models: a token by context, batches, prompts, training steps, beside GPT-2."
_CODE = "tost.bench.generate.tables:GenerateMeasurement"
BENCHMARK = Benchmark(name="generate", help=_HELP, scale=GenerateScale, measurement=_CODE)
