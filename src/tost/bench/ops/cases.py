"""What is measured: one operator at one shape, in one dtype, forward or forward and backward.

Loads no torch: the command line is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import product
from typing import Annotated, Any

from tost.bench.harness.benchmark import Benchmark, Option
from tost.bench.harness.timing import Plan
from tost.errors import ConfigError

_STANDARD = "as the standard shapes"


class Op(StrEnum):
    """Operators, by their public names."""

    TSSA = "tssa"
    CAUSAL_TSSA = "causal_tssa"


# Model width and heads: the paper's small vision model and base language model.
_WIDTH_AND_HEADS: dict[Op, tuple[int, int]] = {Op.TSSA: (384, 8), Op.CAUSAL_TSSA: (768, 12)}
# (batch, tokens); 8 x 196 is a small batch of 224-pixel images in 16-pixel patches.
_SHAPES: dict[Op, tuple[tuple[int, int], ...]] = {
    Op.TSSA: ((8, 196), (1, 1024), (1, 4096), (1, 10240), (1, 65536)),
    Op.CAUSAL_TSSA: ((1, 1024), (1, 4096), (1, 8192)),
}
_QUICK_SHAPES: dict[Op, tuple[tuple[int, int], ...]] = dict.fromkeys(Op, ((1, 256), (1, 1024)))


class Mode(StrEnum):
    """What one run does: the forward pass without gradients, or forward and backward."""

    FWD = "fwd"
    FWD_BWD = "fwd+bwd"


class Dtype(StrEnum):
    """Types of inputs and weights, by their names in torch; those that the gate checks."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An attention layer of width `width` on `batch` sequences of `tokens` tokens."""

    op: Op
    batch: int
    tokens: int
    width: int
    heads: int
    dtype: Dtype = Dtype.FLOAT32
    block_size: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "width", "heads", "block_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} cannot be measured; {name} must be at least 1.")
        if self.width % self.heads:
            raise ConfigError(
                f"width={self.width} does not divide into heads={self.heads}; "
                f"choose a width that is a multiple of the heads, for example {self.heads * 64}."
            )
        if self.head_width % self.block_size:
            raise ConfigError(
                f"block_size={self.block_size} does not divide the head width {self.head_width}; choose one that does."
            )

    @property
    def shape(self) -> dict[str, Any]:
        """The fields that every shape has, by name."""
        return {each.name: getattr(self, each.name) for each in fields(Shape)}

    @property
    def head_width(self) -> int:
        """Features per head."""
        return self.width // self.heads

    @property
    def causal(self) -> bool:
        """Whether a token sees only the tokens before it and itself."""
        return self.op is Op.CAUSAL_TSSA


@dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """One thing to measure: a layer in one pass."""

    mode: Mode = Mode.FWD

    @property
    def label(self) -> str:
        """One line for progress reports and error messages."""
        blocks = "" if self.block_size == 1 else f" g={self.block_size}"
        return f"{self.op} {self.mode} {self.batch}x{self.tokens} d={self.width} H={self.heads}{blocks} {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class OpsScale:
    """How much is measured, and for how long.

    Attributes:
        op: Operators to measure.
        mode: Passes to measure.
        tokens: Sequence lengths; None takes the standard shapes.
        width: Model width; None takes the operator's standard width.
        heads: Number of heads; None takes the operator's standard number.
        batch: Sequences per batch; None takes the standard shapes' batch, or 1 when `tokens` is given.
        dtype: Type of inputs and weights.
        block_size: Features in a block of our layer's statistics.
        repeats: See `Plan`.
        compile: Whether the paper's formulation is also measured with torch.compile.
        short: Take a small set of standard shapes, for a demonstration.
        case_seconds: See `Plan`.
        contender_seconds: See `Plan`.

    Raises:
        ConfigError: A size is not positive, or a width does not divide into its heads.
    """

    op: Annotated[tuple[Op, ...], Option("Operator; repeat for more.", default="all")] = tuple(Op)
    mode: Annotated[tuple[Mode, ...], Option("Pass; repeat for more.", default="both")] = tuple(Mode)
    tokens: Annotated[tuple[int, ...] | None, Option("Sequence lengths.", metavar="N,N,...", default=_STANDARD)] = None
    width: Annotated[int | None, Option("Model width.", metavar="N", least=1, default=_STANDARD)] = None
    heads: Annotated[int | None, Option("Heads.", metavar="N", least=1, default=_STANDARD)] = None
    batch: Annotated[int | None, Option("Sequences.", metavar="N", least=1, default=_STANDARD)] = None
    dtype: Annotated[Dtype, Option("Type of inputs and weights.")] = Dtype.FLOAT32
    block_size: Annotated[int, Option("Features in a block of our layer's statistics.", metavar="N", least=1)] = 1
    repeats: Annotated[int, Option("Least timed runs.", metavar="N", least=3, selects=False)] = 30
    compile: Annotated[bool, Option("Include torch.compile of the paper's formulation.", selects=False)] = True
    short: bool = False
    case_seconds: float = 4.0
    contender_seconds: float = 20.0

    def __post_init__(self) -> None:
        _ = self.cases  # impossible sizes are refused at once

    @classmethod
    def quick(cls) -> OpsScale:
        """Few short sequences, few runs: a demonstration."""
        return cls(short=True, repeats=5, case_seconds=0.0, contender_seconds=2.0)

    @property
    def plan(self) -> Plan:
        """How long to measure."""
        return Plan(repeats=self.repeats, case_seconds=self.case_seconds, contender_seconds=self.contender_seconds)

    @property
    def cases(self) -> list[Case]:
        """Every combination without repetition, short ones first within each operator."""
        found = []
        for op in self.op:
            standard_width, standard_heads = _WIDTH_AND_HEADS[op]
            C = standard_width if self.width is None else self.width
            H = standard_heads if self.heads is None else self.heads
            standard = (_QUICK_SHAPES if self.short else _SHAPES)[op]
            shapes = standard if self.tokens is None else [(1, tokens) for tokens in self.tokens]
            for (standard_batch, N), mode in product(shapes, self.mode):
                B = standard_batch if self.batch is None else self.batch
                sizes = {"batch": B, "tokens": N, "width": C, "heads": H, "block_size": self.block_size}
                found.append(Case(op=op, **sizes, dtype=self.dtype, mode=mode))
        return list(dict.fromkeys(found))


_HELP = "Time our attention layers against their projections, the paper's code and others."
_CODE = "tost.bench.ops.tables:OpsMeasurement"
BENCHMARK = Benchmark(name="ops", help=_HELP, scale=OpsScale, measurement=_CODE, files="JSON, Markdown and a plot")
