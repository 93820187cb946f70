"""Throughput, time left and utilization, the line that shows them, and records that a run has left. Loads no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tost._progress import format_duration

if TYPE_CHECKING:
    import torch

WINDOW = 50
"""Steps over which throughput is averaged: long enough to be steady, short enough to follow a change."""


@dataclass(frozen=True)
class StepRecord:
    """What is known after an optimizer step; one line of ``metrics.jsonl``.

    Attributes:
        step: Optimizer steps done so far.
        steps: Optimizer steps of the whole run.
        loss: Mean training loss of this step over the global batch.
        lr: Learning rate that this step used.
        grad_norm: Norm of the gradient before clipping; None where it was not computed.
        tokens_per_second: Tokens of the global batch per second, averaged over the last steps.
        seconds_per_step: The same window, per step.
        mfu: Share of the measured peak of matrix multiplication that the model's own arithmetic reaches, in [0, 1].
        memory_bytes: Memory of this process: allocated tensors on a GPU, or else resident memory.
        eta_seconds: Time left at the present speed.
        unit: What is counted as tokens, in short: ``"tok"``, or ``"img"`` for images.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_second: float
    seconds_per_step: float
    mfu: float | None
    memory_bytes: int
    eta_seconds: float
    unit: str = "tok"


@dataclass(kw_only=True, eq=False)
class Progress:
    """Throughput, time left and utilization from the times at which steps end.

    Args:
        steps: Optimizer steps of the whole run.
        tokens_per_step: Tokens in a global batch.
        flops_per_step: Floating point operations of a step (forward and backward) over all processes; None if unknown.
        peak_flops: What the processes together can reach, in operations per second; None if unknown.
        clock: Monotonic seconds; replaced in tests.
    """

    steps: int
    tokens_per_step: int
    flops_per_step: float | None = None
    peak_flops: float | None = None
    clock: Callable[[], float] = time.perf_counter
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1), init=False)

    def __post_init__(self) -> None:
        self.step_done()

    def pause(self) -> None:
        """Forget the past: what comes next (an evaluation, a checkpoint) is not part of a step's time."""
        self.ends.clear()
        self.step_done()

    def step_done(self) -> None:
        """Note that a step has just ended."""
        self.ends.append(self.clock())

    @property
    def seconds_per_step(self) -> float:
        """Mean time of a step over the window; 0 before the first."""
        counted = len(self.ends) - 1
        return (self.ends[-1] - self.ends[0]) / counted if counted > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch per second."""
        return self.tokens_per_step / self.seconds_per_step if self.seconds_per_step > 0 else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: arithmetic of the model per second over the measured peak."""
        if self.flops_per_step is None or self.peak_flops is None or self.seconds_per_step <= 0:
            return None
        return self.flops_per_step / self.seconds_per_step / self.peak_flops

    def eta_seconds(self, step: int) -> float:
        """Time left after `step` steps."""
        return (self.steps - step) * self.seconds_per_step


LONGEST = 0.5
"""Seconds after which the peak is measured well enough."""


def measure_peak_flops(device: torch.device, dtype: torch.dtype, *, size: int | None = None, repeats: int = 5) -> float:
    """Return the operations per second of a square matrix product, the best of a few: the peak that MFU refers to.

    Args:
        device: Where.
        dtype: Arithmetic of the products.
        size: Rows of the matrices; None for as many as it takes to keep the device busy.
        repeats: Measurements after the first.
    """
    import torch

    # A GPU needs a large product, and several in a row: starting one takes as long as a small product.
    size, burst = (size or 768, 1) if device.type == "cpu" else (size or 4096, 10)
    # Not random: a run may not draw numbers that its training does not.
    a, b = (torch.full((size, size), 0.5, device=device, dtype=dtype) for _ in range(2))
    best, began = float("inf"), time.perf_counter()
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(burst):
            c = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / burst)
        if time.perf_counter() - began > LONGEST:  # half precision takes seconds where the processor lacks it
            break
    del c
    return 2 * size**3 / best


def format_count(value: float) -> str:
    """Write a number with three digits and a unit: ``41.2k``, ``1.30M``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def format_line(record: StepRecord) -> str:
    """Write a record as one line whose fields always come in the same order."""
    width = len(str(record.steps))
    norm = "-" if record.grad_norm is None else f"{record.grad_norm:.2f}"
    fields = [
        f"step {record.step:{width}d}/{record.steps}",
        f"loss {record.loss:.4f}",
        f"lr {record.lr:.2e}",
        f"gnorm {norm}",
        f"{format_count(record.tokens_per_second)} {record.unit}/s",
        f"{record.seconds_per_step:.3g} s/step",
        f"mem {record.memory_bytes / 1e9:.2f} GB",
        f"eta {format_duration(record.eta_seconds)}",
    ]
    return " | ".join(fields)


def was_resumed(folder: Path) -> bool:
    """Return whether a run was interrupted and resumed; its summary then has the time since the last interruption."""
    try:
        with (folder / "log.txt").open(encoding="utf-8", errors="replace") as lines:
            return any(line.startswith("resumed from ") for line in lines)
    except OSError:
        return False
