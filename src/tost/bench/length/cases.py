"""What is measured about training steps on long sequences. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tost.bench.harness.benchmark import Benchmark, Choice, Option


class Way(Choice):
    """A model, and how it takes a sequence."""

    PIECES = "pieces", "ToST, piece by piece: each is computed again on the way back, gradients flow through the states"
    WHOLE = "whole", "the same model on the whole sequence at once"
    GPT2 = "gpt2", "GPT-2 of the same width and depth on the whole sequence, with PyTorch's fused softmax attention"


@dataclass(frozen=True, kw_only=True)
class LengthScale:
    """What is measured, and how long.

    Attributes:
        tokens: Lengths of the one sequence, ascending.
        chunk: Tokens per piece.
        width: Model width.
        heads: Heads.
        depth: Layers.
        vocab_size: Ids; those of bytes.
        limit_seconds: A whole sequence that is expected to take longer is left out, with a note. Pieces never are.
        limit_bytes: The same for memory; None for three quarters of what is free.
        checked_tokens: Length at which gradients in pieces are compared with those of the whole.
    """

    tokens: Annotated[tuple[int, ...], Option("Lengths of the sequence.", metavar="N,...")] = (
        *(4096, 16_384, 65_536),
        1_048_576,
    )
    chunk: Annotated[int, Option("Tokens per piece.", metavar="N", least=1)] = 4096
    width: Annotated[int, Option("Model width.", metavar="C", least=1)] = 768
    heads: Annotated[int, Option("Heads.", metavar="H", least=1)] = 12
    depth: Annotated[int, Option("Layers.", metavar="L", least=1)] = 2
    vocab_size: int = 256
    limit_seconds: Annotated[
        float, Option("Leave out slower steps on whole sequences.", metavar="S", least=0, selects=False)
    ] = 300.0
    limit_bytes: int | None = None
    checked_tokens: int = 65_536

    @classmethod
    def quick(cls) -> LengthScale:
        """Measure a narrow model on shorter sequences."""
        return cls(tokens=(1024, 4096), chunk=512, width=64, heads=4, checked_tokens=4096)

    @property
    def cases(self) -> list[tuple[Way, int]]:
        """Every way at every length, in the order of the measurement: a way's short sequences come first."""
        return [(way, tokens) for way in Way for tokens in self.tokens]


_HELP = "Measure memory and time of a training step by length, in pieces, whole, and of GPT-2."
_CODE = "tost.bench.length.run:LengthMeasurement"
BENCHMARK = Benchmark(name="length", help=_HELP, scale=LengthScale, measurement=_CODE)
