"""What closed-form gradients leave to PyTorch: forward-mode derivatives, second ones, and ``torch.func``.

The fast paths of this package have a forward pass and a hand-written backward pass. Everything else that torch can do
with a function (`torch.func.jvp`, ``hessian``, ``vmap``, a backward pass with ``create_graph=True``) runs the same
equations as plain differentiable PyTorch, of any order and in any combination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.overrides import has_torch_function

Tensors = tuple[Tensor | None, ...]


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func``, or forward-mode differentiation, is at work.

    False while ``torch.compile`` reads Python: registered operators are asked again when the graph is built.
    """
    return not torch.compiler.is_compiling() and transforms_active()


def transforms_active() -> bool:
    """Return the same for a registered operator, which the compiler does not look into."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _keys(*names: str) -> int:
    sets = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return reduce(or_, (int(each.raw_repr()) for each in sets))


# By name, not by looking at a tensor: a mode may be at work when this module is loaded.
_USUAL = _keys("BackendSelect", "ADInplaceOrView")  # what every thread starts with
_PLAIN = {
    _keys("CPU", "AutocastCPU", "AutogradCPU", "ADInplaceOrView"),
    _keys("CPU", "AutocastCPU"),  # inference tensors
}


def is_observed(arguments: Sequence[Any]) -> bool:
    """Return whether a call with these arguments has to go through torch's dispatcher.

    That is so if a mode, a transform, a tracer or the profiler is at work, or if a tensor among them is more than plain
    memory on the CPU: of a class of its own, or a view that is still to be negated. Autograd is left to the caller.
    """
    return (
        has_torch_function(arguments)
        or torch._C._dispatch_tls_local_include_set().raw_repr() & ~_USUAL != 0
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
        or not _PLAIN.issuperset([torch._C._dispatch_keys(x).raw_repr() for x in arguments if isinstance(x, Tensor)])
    )


def has_values(x: Tensor) -> bool:
    """Return whether checks may look at the numbers of x: it is on the CPU, and nothing traces or maps over it.

    Looking would break a compiled graph and wait for another device, which refuses bad numbers in its own words.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not transforms_active()


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
