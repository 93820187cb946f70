"""What is measured about attention layers side by side: the paper's four figures, whole base models, one layer alone.

Loads no torch: the command line is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import product
from typing import Annotated

from tost._text import count
from tost.bench.harness.benchmark import Benchmark, Option
from tost.errors import ConfigError

TOST = "tost"
CONTENDERS = (TOST, "vit-sdpa", "vit-textbook", "crate", "xcit")
CAUSAL_CONTENDERS = (TOST, "gpt2-sdpa", "gpt2-textbook")
SUMMARIES = {
    TOST: "token statistics self-attention, causal in the causal figures",
    "vit-sdpa": "softmax attention of ViT on PyTorch's fused kernel",
    "vit-textbook": "the same in three steps: all scores, their softmax, the weighted sum; all scores are in memory",
    "crate": "subspace attention of CRATE, one projection as query, key and value, on PyTorch's fused kernel",
    "xcit": "cross-covariance attention of XCiT, among the features of a head",
    "gpt2-sdpa": "causal softmax attention of GPT-2 on PyTorch's fused kernel",
    "gpt2-textbook": "the same in four steps: all scores, the mask, their softmax, the weighted sum",
}
"""What each contender computes. Every one has its own projections in and out."""

PAPER_DEPTH = 12
"""Layers in each of the paper's figures."""

PAPER_TOKENS = 10_000
"""The length for which the paper states by how much ToST is ahead."""


class Device(StrEnum):
    """Where to measure."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Figure(StrEnum):
    """Figures: the paper's four, whole language models, and one layer alone in both passes."""

    TOKENS = "tokens"
    WIDTH = "width"
    LARGE = "large"
    CAUSAL = "causal"
    BASE = "base"
    ALONE = "alone"

    @property
    def published(self) -> bool:
        """Whether the paper has it."""
        return self not in (Figure.BASE, Figure.ALONE)

    @property
    def axis(self) -> str:
        """What varies along the horizontal axis: ``tokens`` or ``width``."""
        return "width" if self is Figure.WIDTH else "tokens"

    @property
    def contenders(self) -> tuple[str, ...]:
        """The contenders in it; the first is compared with the others."""
        return CAUSAL_CONTENDERS if self in (Figure.CAUSAL, Figure.BASE) else CONTENDERS


@dataclass(frozen=True, kw_only=True)
class Point:
    """One contender at one size: what a process measures.

    Attributes:
        figure: The figure that it belongs to.
        contender: One of the figure's contenders.
        tokens: Length of the one sequence, N.
        width: Model width, C.
        heads: Heads, H.
        depth: Layers.
        training: Forward and backward; else forward alone, without a graph.
        vocab_size: Ids of a whole model.
    """

    figure: Figure
    contender: str
    tokens: int
    width: int
    heads: int
    depth: int
    training: bool = False
    vocab_size: int = 50_304

    def __post_init__(self) -> None:
        if self.contender not in self.figure.contenders:
            raise ConfigError(
                f"{self.contender}: not in the figure {self.figure}; it has {', '.join(self.figure.contenders)}."
            )
        if min(self.tokens, self.width, self.heads, self.depth) < 1 or self.width % self.heads:
            raise ConfigError(
                f"{self.label} cannot be measured; all sizes must be at least 1, and the width a multiple of the heads."
            )

    @property
    def causal(self) -> bool:
        """Whether a token sees only the tokens before it and itself."""
        return self.figure in (Figure.CAUSAL, Figure.BASE)

    @property
    def whole(self) -> bool:
        """Whether it is a whole language model; else attention layers alone."""
        return self.figure is Figure.BASE

    @property
    def position(self) -> int:
        """Place on the horizontal axis of its figure."""
        return self.width if self.figure.axis == "width" else self.tokens

    @property
    def series(self) -> tuple[Figure, str, bool]:
        """What it has in common with the other points of its line in a picture."""
        return self.figure, self.contender, self.training

    @property
    def label(self) -> str:
        """One line for progress and error messages."""
        sizes = f"N={self.tokens} d={self.width} K={self.heads} {count(self.depth, 'layer')}"
        return f"{self.figure}: {self.contender} {sizes}{', training step' * self.training}"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one figure; every combination of `tokens` and `widths` is measured.

    Attributes:
        tokens: Lengths, ascending.
        widths: Model widths, ascending.
        heads: Heads.
        depth: Layers.
        passes: False for forward alone, True for forward and backward.
        vocab_size: Ids of whole models.
    """

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    heads: int
    depth: int = PAPER_DEPTH
    passes: tuple[bool, ...] = (False,)
    vocab_size: int = 50_304

    def point(self, figure: Figure, contender: str, *, tokens: int, width: int, training: bool) -> Point:
        """Return one contender at one of the sizes."""
        common = {"heads": self.heads, "depth": self.depth, "vocab_size": self.vocab_size}
        return Point(figure=figure, contender=contender, tokens=tokens, width=width, training=training, **common)


_STANDARD_SHAPES = {
    Figure.ALONE: Shape(
        tokens=(1024, 4096, PAPER_TOKENS, 16_384), widths=(384,), heads=8, depth=1, passes=(False, True)
    ),
    Figure.TOKENS: Shape(tokens=(1024, 2048, 4096, PAPER_TOKENS, 16_384), widths=(384,), heads=8),
    Figure.WIDTH: Shape(tokens=(4096,), widths=(96, 192, 384, 768, 1536), heads=8),
    # Twelve layers of this width take minutes on a CPU and show the same: layers follow one another.
    Figure.LARGE: Shape(tokens=(512, 1024, 2048, 4096, 8192), widths=(4096,), heads=32, depth=1),
    Figure.CAUSAL: Shape(tokens=(1024, 2048, 4096, 8192, 16_384), widths=(768,), heads=12),
    Figure.BASE: Shape(tokens=(2048, 4096, 8192), widths=(768,), heads=12),
}


def _bytes(gigabytes: float) -> int:
    return int(1e9 * gigabytes)


_limit = partial(Option, reads=float, least=0, selects=False)


@dataclass(frozen=True, kw_only=True)
class AttentionScale:
    """How much is measured, and for how long.

    Attributes:
        figure: Figures to measure.
        device: ``cpu`` or ``cuda``; ``auto`` until it is chosen.
        limit_seconds: A point whose single pass is expected to take longer is left out, with a note.
        limit_bytes: The same for the memory that it is expected to need; None for three quarters of what is free.
        total_seconds: After this long what is left is left out, with a note.
        shapes: Figures with their sizes, in the order in which they are measured.
        pass_seconds: Passes are repeated for about this long; one that takes longer by itself is timed once.
        least_repeats: Timed passes, at least, of those that are repeated.
        most_repeats: Timed passes, at most.
        rounds: Pairs of runs of ToST and softmax attention in the figure `alone`; 0 for none.
    """

    figure: Annotated[tuple[Figure, ...], Option("Figure; repeat for more.", default="all", stored=False)] = tuple(
        Figure
    )
    device: Annotated[Device, Option("Where; auto takes a GPU if there is one.", selects=False)] = Device.AUTO
    limit_seconds: Annotated[float, _limit("Leave out slower passes.", "S")] = 60.0
    limit_bytes: Annotated[
        int | None,
        _limit("Leave out what needs more.", "GB", "limit-gb", convert=_bytes, default="3/4 of what is free"),
    ] = None
    total_seconds: Annotated[
        float,
        _limit("Start nothing after this long.", "M", "minutes", convert=lambda minutes: 60 * minutes, default="26"),
    ] = 26 * 60.0
    shapes: Mapping[Figure, Shape] = field(default_factory=lambda: dict(_STANDARD_SHAPES))
    pass_seconds: float = 2.0
    least_repeats: int = 3
    most_repeats: int = 50
    rounds: int = 5

    @classmethod
    def quick(cls) -> AttentionScale:
        """Short sequences, few runs: a demonstration."""
        lengths = (256, 512)
        shapes = {
            Figure.ALONE: Shape(tokens=lengths[-1:], widths=(64,), heads=4, depth=1, passes=(False, True)),
            Figure.TOKENS: Shape(tokens=lengths, widths=(64,), heads=4, depth=2),
            Figure.WIDTH: Shape(tokens=(256,), widths=(64, 128), heads=4, depth=2),
            Figure.LARGE: Shape(tokens=lengths[-1:], widths=(256,), heads=8, depth=1),
            Figure.CAUSAL: Shape(tokens=lengths, widths=(64,), heads=4, depth=2),
            Figure.BASE: Shape(tokens=lengths[-1:], widths=(64,), heads=4, depth=2, vocab_size=256),
        }
        return cls(shapes=shapes, pass_seconds=0.1, most_repeats=5, rounds=3)

    def on(self, device: str) -> AttentionScale:
        """Return what is measured on a device: the chosen figures, and on a GPU the wide layers twelve deep too."""
        shapes = {figure: shape for figure, shape in self.shapes.items() if figure in self.figure}
        if device == "cuda" and shapes.get(Figure.LARGE) == _STANDARD_SHAPES[Figure.LARGE]:
            shapes[Figure.LARGE] = replace(shapes[Figure.LARGE], depth=PAPER_DEPTH)
        return replace(self, device=Device(device), shapes=shapes)

    @property
    def points(self) -> list[Point]:
        """Everything to be measured, in order: within a figure short ones first, all contenders of a size together."""
        return [
            shape.point(figure, name, tokens=N, width=C, training=training)
            for figure, shape in self.shapes.items()
            for training, N, C in product(shape.passes, shape.tokens, shape.widths)
            for name in figure.contenders
        ]


_HELP = "Time ToST, ViT, CRATE, XCiT and GPT-2 attention by size, with memory and roofline."
_CODE = "tost.bench.attention.tables:AttentionMeasurement"
BENCHMARK = Benchmark(
    name="attention", help=_HELP, scale=AttentionScale, measurement=_CODE, files="JSON, Markdown and plots"
)
