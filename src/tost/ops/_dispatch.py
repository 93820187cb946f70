"""Who can run a call, and why not.

Every operator has a list of implementations, fastest first. Each one says for a given call what stands in its way; an
empty list means that it can run. ``backend="auto"`` takes the first that can, an explicit name runs or raises with its
reasons. An exception inside a check is a bug and propagates: no implementation ever disappears silently.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost import _env
from tost.errors import BackendError

__all__ = ["Backend", "available_backends", "operators", "register", "select"]


def _nothing_missing() -> list[str]:
    return []


def _runs_anywhere(w: Tensor) -> list[str]:
    return []


class Backend(NamedTuple):
    """One implementation of an operator.

    Attributes:
        name: What a user passes as ``backend=``.
        run: The implementation. All implementations of an operator take the same arguments.
        run_inplace: The same, leaving its result in the memory of the first argument; None if it has no such form.
        missing: Reasons why it cannot run here at all, whatever the call. Empty when it is ready.
        why_not: Reasons why it cannot run this call, given its tokens ``w``. Asked only when nothing is missing.
    """

    name: str
    run: Callable[..., Any]
    run_inplace: Callable[..., Any] | None = None
    missing: Callable[[], list[str]] = _nothing_missing
    why_not: Callable[[Tensor], list[str]] = _runs_anywhere

    def reasons(self, w: Tensor) -> list[str]:
        """Return everything that stands in the way of running on `w`."""
        return self.missing() or self.why_not(w)


_REGISTRY: dict[str, tuple[Backend, ...]] = {}
# Read once: the value is part of the program, and compiled graphs may not look at the environment.
_DEFAULT = _env.BACKEND.get()
_WARNED: set[str] = set()


def register(op: str, *backends: Backend) -> None:
    """Make `backends` the implementations of `op`, fastest first; the last one must run anywhere."""
    _REGISTRY[op] = backends


def operators() -> list[str]:
    """Return the names of the operators that have implementations."""
    return list(_REGISTRY)


def available_backends(op: str) -> dict[str, str]:
    """Say which implementations of an operator can run here.

    Args:
        op: ``"tssa"`` or ``"causal_tssa"``.

    Returns:
        Implementation name to ``"ready"`` or the reasons why it is not, fastest first.

    Raises:
        ValueError: There is no such operator.

    Example:
        >>> import tost
        >>> tost.available_backends("tssa")["reference"]
        'ready'
    """
    if op not in _REGISTRY:
        raise ValueError(f"there is no operator {op!r}; the operators are {', '.join(_REGISTRY)}.")
    return {backend.name: "; ".join(backend.missing()) or "ready" for backend in _REGISTRY[op]}


def select(op: str, requested: str, w: Tensor) -> Backend:
    """Return the implementation of `op` that will run on the tokens `w`.

    Args:
        op: Name of a registered operator.
        requested: ``"auto"`` or the name of an implementation.
        w: The call's tokens.

    Raises:
        BackendError: `requested` is unknown or cannot run this call; every reason is listed.
    """
    backends = _REGISTRY[op]
    name = _DEFAULT if requested == "auto" else requested
    if name == "auto":
        for backend in backends:
            if not backend.reasons(w):
                if backend is not backends[0]:
                    _warn_once(op, backend, backends[0], w)
                return backend
        raise BackendError(_refusal(op, backends, w))
    for backend in backends:
        if backend.name == name:
            if backend.reasons(w):
                raise BackendError(_refusal(op, (backend,), w))
            return backend
    names = [backend.name for backend in backends]
    guess = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {guess[0]!r}?" if guess else ""
    raise BackendError(f"`{op}` has no backend {name!r}; it has auto, {', '.join(names)}.{hint}")


def _refusal(op: str, candidates: tuple[Backend, ...], w: Tensor) -> str:
    lines = [f"{candidate.name}: {'; '.join(candidate.reasons(w))}" for candidate in candidates]
    return (
        f"no backend can run `{op}` on these inputs:\n"
        f"    w  {tuple(w.shape)} {str(w.dtype).removeprefix('torch.')} on {w.device}\n"
        + "".join(f"  {line}\n" for line in lines)
        + '  fix: pass backend="reference" to run anywhere, or run `tost info` to see what is missing'
    )


def _warn_once(op: str, chosen: Backend, faster: Backend, w: Tensor) -> None:
    # On other devices the native CPU kernel is no loss; on a CPU its absence is worth one line.
    if torch.compiler.is_compiling() or w.device.type != "cpu" or faster.name in _WARNED:
        return
    _WARNED.add(faster.name)
    warnings.warn(
        f"`{op}` runs on backend {chosen.name!r}; {faster.name!r} is faster but cannot be used: "
        f"{'; '.join(faster.reasons(w))}. See `tost info`.",
        RuntimeWarning,
        stacklevel=4,
    )
