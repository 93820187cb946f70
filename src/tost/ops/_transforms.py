"""What closed-form gradients leave to PyTorch: forward-mode derivatives, second ones, and ``torch.func``.

The fast paths of this package have a forward pass and a hand-written backward pass. Everything else that torch can do
with a function (`torch.func.jvp`, ``hessian``, ``vmap``, a backward pass with ``create_graph=True``) runs the same
equations as plain differentiable PyTorch, of any order and in any combination.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Tensors = tuple[Tensor | None, ...]


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func``, or forward-mode differentiation, is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def has_values(x: Tensor) -> bool:
    """Return whether checks may look at the numbers of x: it is on the CPU, and nothing traces or maps over it.

    Looking would break a compiled graph and wait for another device, which refuses bad numbers in its own words.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()


def wants_graph() -> bool:
    """Return whether the backward pass that is running will be differentiated (``create_graph=True``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def gradients(function: Callable[..., Any], inputs: Tensors, cotangents: Any) -> Tensors:
    """Return the gradients of a function of tensors, differentiable themselves.

    Args:
        function: Made of differentiable operations; it takes the inputs, None included.
        inputs: Tensors, or None.
        cotangents: Gradients of what the function returns, in the same structure.

    Returns:
        One per input, None for None.
    """
    given = [x for x in inputs if x is not None]

    def call(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        return function(*(None if x is None else next(remaining) for x in inputs))

    pull = torch.func.vjp(call, *given)[1]
    found = iter(pull(cotangents))
    return tuple([None if x is None else next(found) for x in inputs])
