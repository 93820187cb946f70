"""Passes of a layer, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tost.bench.harness.timing import Trial, no_wait


def layer_trial(layer: nn.Module, x: Tensor, cotangent: Tensor | None, *, wait: Callable[[], None] = no_wait) -> Trial:
    """Return the forward pass of a layer, or its forward and backward pass.

    Args:
        layer: Maps the tokens to as many others.
        x: The tokens.
        cotangent: Gradient that arrives at the output; None for the forward pass alone, without a graph.
        wait: Waits for the device.
    """

    def run() -> Tensor:
        if cotangent is None:
            with torch.no_grad():
                y: Tensor = layer(x)
            return y
        y = layer(x)
        torch.autograd.backward(y, cotangent)
        return y

    def reset() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    return Trial(run, reset, wait)
