"""Gradient checkpointing that counts a batch once: running statistics are not updated again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tost.ops._transforms import is_transformed

_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing", default=False)


class _Recomputing(AbstractContextManager[None]):
    """Marks a recomputation. It can be entered again, since a graph may have several backward passes."""

    def __enter__(self) -> None:
        self._before: Token[bool] = _RECOMPUTING.set(True)

    def __exit__(self, *error: object) -> None:
        _RECOMPUTING.reset(self._before)


def is_recomputing() -> bool:
    """Return whether a function that was given to `recompute` is running for a backward pass."""
    return _RECOMPUTING.get()


def recompute(function: Callable[..., Any], *arguments: Any, preserve_rng_state: bool = True) -> Any:
    """Call a function and keep only its arguments for the backward pass, which calls it again.

    Transforms of ``torch.func`` cannot compute again: under them everything is kept.

    Args:
        function: What to call.
        arguments: Its arguments.
        preserve_rng_state: Repeat the random numbers of the first call; not needed without dropout.

    Returns:
        What the function returns.
    """
    if is_transformed():
        return function(*arguments)
    if torch.compiler.is_compiling():  # the compiler has its own way of computing again
        return checkpoint(function, *arguments, use_reentrant=False)
    return checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        context_fn=lambda: (nullcontext(), _Recomputing()),
    )
