"""What is measured: one operator at one shape, in one dtype, forward or forward and backward.

This file imports no torch, because the command line reads the legal names from it before it knows what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from tost.errors import ConfigError

__all__ = ["Case", "Dtype", "Mode", "Op", "select_cases"]


class Op(StrEnum):
    """Operators, by their public names."""

    TSSA = "tssa"
    CAUSAL_TSSA = "causal_tssa"


class Mode(StrEnum):
    """What one run does: the forward pass without gradients, or forward and backward."""

    FWD = "fwd"
    FWD_BWD = "fwd+bwd"


class Dtype(StrEnum):
    """Types of inputs and weights, by their names in torch; those that the gate checks."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


# Model width and heads: the paper's small vision model and base language model.
_WIDTH_AND_HEADS: dict[Op, tuple[int, int]] = {Op.TSSA: (384, 8), Op.CAUSAL_TSSA: (768, 12)}
# (batch, tokens); 8 x 196 is a small batch of 224-pixel images in 16-pixel patches.
_SHAPES: dict[Op, tuple[tuple[int, int], ...]] = {
    Op.TSSA: ((8, 196), (1, 1024), (1, 4096), (1, 10240), (1, 65536)),
    Op.CAUSAL_TSSA: ((1, 1024), (1, 4096), (1, 8192)),
}
_QUICK_SHAPES: dict[Op, tuple[tuple[int, int], ...]] = {
    Op.TSSA: ((1, 256), (1, 1024)),
    Op.CAUSAL_TSSA: ((1, 256), (1, 1024)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure: an attention layer of width `width` on `batch` sequences of `tokens` tokens."""

    op: Op
    batch: int
    tokens: int
    width: int
    heads: int
    dtype: Dtype = Dtype.FLOAT32
    mode: Mode = Mode.FWD

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "width", "heads"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} cannot be measured; {name} must be at least 1.")
        if self.width % self.heads:
            raise ConfigError(
                f"width={self.width} does not divide into heads={self.heads}; "
                f"choose a width that is a multiple of the heads, for example {self.heads * 64}."
            )

    @property
    def head_width(self) -> int:
        """Features per head."""
        return self.width // self.heads

    @property
    def causal(self) -> bool:
        """Whether a token sees only the tokens before it and itself."""
        return self.op is Op.CAUSAL_TSSA

    @property
    def label(self) -> str:
        """One line for progress reports and error messages."""
        return f"{self.op} {self.mode} {self.batch}x{self.tokens} d={self.width} H={self.heads} {self.dtype}"

    @property
    def shape(self) -> Case:
        """The same case without its mode: what a memory figure depends on."""
        return replace(self, mode=Mode.FWD)


def select_cases(
    *,
    ops: Sequence[Op] = tuple(Op),
    modes: Sequence[Mode] = tuple(Mode),
    dtype: Dtype = Dtype.FLOAT32,
    tokens: Sequence[int] | None = None,
    batch: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    quick: bool = False,
) -> list[Case]:
    """Return the cases that a command asks for, short ones first within each operator.

    Args:
        ops: Operators to measure.
        modes: Passes to measure.
        dtype: Type of inputs and weights.
        tokens: Sequence lengths; None takes the standard shapes.
        batch: Sequences per batch; None takes the standard shapes' batch, or 1 when `tokens` is given.
        width: Model width; None takes the operator's standard width.
        heads: Number of heads; None takes the operator's standard number.
        quick: Take a small set of standard shapes, for a demonstration.

    Returns:
        Every combination, without repetition.

    Raises:
        ConfigError: A size is not positive, or a width does not divide into its heads.
    """
    cases = []
    for op in ops:
        standard_width, standard_heads = _WIDTH_AND_HEADS[op]
        C = standard_width if width is None else width
        H = standard_heads if heads is None else heads
        shapes = (_QUICK_SHAPES if quick else _SHAPES)[op] if tokens is None else [(1, count) for count in tokens]
        for (standard_batch, N), mode in product(shapes, modes):
            B = standard_batch if batch is None else batch
            cases.append(Case(op=op, batch=B, tokens=N, width=C, heads=H, dtype=dtype, mode=mode))
    return list(dict.fromkeys(cases))
