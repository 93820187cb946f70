"""Passes of a layer, ready to be timed, and steps of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tost.bench.harness.memory import watch_peak
from tost.bench.harness.timing import Stopwatch, Trial, timed


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a step of training took.

    Attributes:
        seconds: Its time; it is the first of its length.
        peak_bytes: By how much memory grew at most. Weights exist before; gradients and an optimizer's moments do not.
        process_bytes: The most memory that the whole process had during the step.
        loss: What the step computed.
    """

    seconds: float
    peak_bytes: int
    process_bytes: int
    loss: float


def measure_step(step: Callable[[], float]) -> Usage:
    """Take a step of training, which returns its loss, and measure its time and memory."""
    losses: list[float] = []
    with watch_peak() as peak:
        seconds = timed(Trial(lambda: losses.append(step())))
    return Usage(seconds=seconds, peak_bytes=peak.growth, process_bytes=peak.process, loss=losses[0])


def layer_trial(layer: nn.Module, x: Tensor, cotangent: Tensor | None, *, stopwatch: Stopwatch | None = None) -> Trial:
    """Return the forward pass of a layer, or its forward and backward pass.

    Args:
        layer: Maps the tokens to as many others.
        x: The tokens.
        cotangent: Gradient that arrives at the output; None for the forward pass alone, without a graph.
        stopwatch: Times it on a device that has a clock of its own.
    """

    def run() -> Tensor:
        with torch.set_grad_enabled(cotangent is not None):
            y: Tensor = layer(x)
        if cotangent is not None:
            torch.autograd.backward(y, cotangent)
        return y

    def reset() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    return Trial(run, reset, stopwatch)
