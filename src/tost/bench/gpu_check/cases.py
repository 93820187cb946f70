"""What is checked and measured on a GPU. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tost.bench.harness.benchmark import Benchmark, Option

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure: an operator on w ``[batch, tokens, heads, width]`` in bfloat16."""

    causal: bool
    backward: bool
    batch: int
    tokens: int
    heads: int
    width: int

    @property
    def label(self) -> str:
        """One line for progress reports."""
        op, mode = "causal_tssa" if self.causal else "tssa", "fwd+bwd" if self.backward else "fwd"
        return f"{op} {mode} {self.batch}x{self.tokens} H={self.heads} D={self.width}"


@dataclass(frozen=True, kw_only=True)
class GpuCheckScale:
    """What is checked and measured.

    Attributes:
        compile: Whether torch.compile of the PyTorch backend is measured, too.
        record: Whether a machine that passes is recorded, so that ``backend="auto"`` uses the kernels there.
        device: Where the tensors are.
        checked: Shapes of w in the comparisons.
        shapes: Shapes of w that are measured: small and large models of the paper, short and long.
    """

    compile: Annotated[bool, Option("Include torch.compile of the PyTorch backend.", selects=False)] = True
    record: Annotated[bool, Option("If all is right, let `auto` use the kernels here.", selects=False)] = True
    device: str = "cuda"
    checked: tuple[Shape, ...] = (
        *((1, 1, 1, 1), (2, 63, 3, 5), (3, 130, 2, 33), (5, 2, 4, 3), (2, 196, 8, 48)),
        *((1, 257, 8, 64), (2, 1100, 6, 64), (1, 4099, 12, 64), (1, 300, 24, 64), (1, 70, 2, 128)),
    )
    shapes: tuple[Shape, ...] = ((64, 196, 6, 64), (1, 10240, 8, 48), (1, 8192, 12, 64), (8, 4096, 12, 64))

    @property
    def cases(self) -> list[Case]:
        """Every shape, with both operators, forward and with its backward pass."""
        return [
            Case(causal=causal, backward=backward, batch=B, tokens=N, heads=H, width=D)
            for B, N, H, D in self.shapes
            for causal in (False, True)
            for backward in (False, True)
        ]


_HELP = "Check the Triton kernels on this machine's GPU, time them, and let `auto` use them."
_CODE = "tost.bench.gpu_check.run:GpuCheck"
BENCHMARK = Benchmark(name="gpu-check", help=_HELP, scale=GpuCheckScale, measurement=_CODE)
