"""Backend dispatch: which implementation runs a call, and the reasons why the others do not.

``backend="auto"`` takes the first backend that can run the call; a name runs that backend or raises with the reasons.
An exception inside a check is a bug and propagates: no backend ever disappears silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tost._text import closest
from tost.errors import BackendError
from tost.ops.backends import BACKENDS, OPERATORS, VARIABLE, Backend
from tost.ops.form import Form

if TYPE_CHECKING:
    from tost.ops._inputs import Inputs
    from tost.ops.packing import Packing
    from tost.ops.state import CausalArguments, GatedState, TSSAState


class Sharing(Protocol):
    """Runs the operators on sequences of which this process holds a piece; see `tost.parallel.ContextParallel`."""

    def tssa(self, inputs: Inputs, form: Form) -> Tensor: ...

    def gated_tssa(
        self,
        backend: str,
        packing: Packing | None,
        w: Tensor,
        write: Tensor,
        mask: Tensor | None,
        state: GatedState | None,
    ) -> tuple[Tensor, GatedState]: ...

    def causal_tssa(
        self, backend: str, packing: Packing | None, *given: *CausalArguments, overwrite: bool
    ) -> tuple[Tensor, TSSAState]: ...


# What runs the operators in place of a backend, the innermost last; empty where a process has whole sequences. Not a
# context variable: the backward pass, which recomputes checkpointed layers, may run in another thread.
SHARING: list[Sharing] = []


class Implementation(NamedTuple):
    """One backend's implementation of an operator.

    Attributes:
        backend: The backend.
        run: The function that runs the operator.
        run_inplace: The same, leaving its result in the memory of the tokens; None if it has no such form.
        unavailable: Returns reasons why the backend cannot be used on this machine.
        unsupported: Returns reasons why it cannot be used for tokens ``w`` in a form. Of the tokens, it may look at the
            dtype.
    """

    backend: Backend
    run: Callable[..., Any]
    run_inplace: Callable[..., Any] | None
    unavailable: Callable[[], list[str]]
    unsupported: Callable[[Tensor, Form], list[str]]

    def automatic(self, device_type: str) -> bool:
        """Return whether ``backend="auto"`` may choose it on a type of device."""
        return self.backend.runs_on(device_type) and self.backend.automatic

    def obstacles(self, w: Tensor, form: Form) -> list[str]:
        """Return every reason why it cannot run on the tokens `w` in a form; empty if it can."""
        if (found := self.unavailable()) or self.backend.runs_on(w.device.type):
            return found or self.unsupported(w, form)
        return [f"needs a {' or '.join(map(str.upper, self.backend.devices))} tensor, got {w.device}"]


def _nothing(*_: object) -> list[str]:
    return []


def _implementation(op: str, backend: Backend, module: ModuleType) -> Implementation:
    return Implementation(
        backend,
        getattr(module, op),
        getattr(module, f"{op}_", None),
        getattr(module, "unavailable", _nothing),
        getattr(module, "unsupported", _nothing),
    )


_MODULES = [(backend, import_module(backend.module)) for backend in BACKENDS]
_IMPLEMENTATIONS = {
    op: tuple(_implementation(op, *loaded) for loaded in _MODULES if op in loaded[0].operators) for op in OPERATORS
}
# Read once: the value is part of the program, and compiled graphs may not look at the environment.
_DEFAULT = VARIABLE.get()
_SELECTED: dict[tuple[object, ...], Implementation] = {}
_OPTIONS = attrgetter(*(field.name for field in fields(Form)))  # quicker than the hash of a form
_WARNED: set[str] = set()
_PLAIN = Form()


def operators() -> list[str]:
    """Return the names of the operators."""
    return list(OPERATORS)


def available_backends(op: str) -> dict[str, str]:
    """Return the backends of an operator and whether each can be used on this machine.

    Args:
        op: ``"tssa"`` or ``"causal_tssa"``.

    Returns:
        Backend name to ``"ready"`` or the reasons why it is not, fastest first.

    Raises:
        ValueError: There is no such operator.

    Example:
        >>> import tost
        >>> tost.available_backends("tssa")["reference"]
        'ready'
    """
    if op not in OPERATORS:
        raise ValueError(f"there is no operator {op!r}; the operators are {', '.join(OPERATORS)}.")
    return {each.backend.name: "; ".join(each.unavailable()) or "ready" for each in _IMPLEMENTATIONS[op]}


def backends_on(device_type: str, op: str) -> dict[str, str]:
    """Return the backends that ``backend="auto"`` considers on a type of device, the fastest first.

    Args:
        device_type: Such as ``"cpu"`` or ``"cuda"``.
        op: ``"tssa"`` or ``"causal_tssa"``.

    Returns:
        As `available_backends`: the first that is ready is the one that runs. If ``TOST_BACKEND`` is set, only that.
    """
    statuses = available_backends(op)
    if _DEFAULT != "auto":
        return {_DEFAULT: statuses[_DEFAULT]}
    considered = [each.backend.name for each in _IMPLEMENTATIONS[op] if each.automatic(device_type)]
    return {name: statuses[name] for name in considered}


def select(op: str, requested: str, w: Tensor, form: Form = _PLAIN) -> Implementation:
    """Return the implementation of `op` that will run on the tokens `w`.

    Args:
        op: Name of an operator.
        requested: ``"auto"`` or the name of a backend.
        w: The call's tokens.
        form: What the call varies.

    Raises:
        BackendError: `requested` is unknown or cannot run this call; every reason is listed.
    """
    if torch.compiler.is_compiling():
        return _select(op, requested, w, form)
    # What decides is the same for all calls in one form with tokens of one dtype on one device.
    key = (op, requested, w.dtype, w.device, _OPTIONS(form))
    found = _SELECTED.get(key)
    if found is None:
        found = _SELECTED[key] = _select(op, requested, w, form)
    return found


def _select(op: str, requested: str, w: Tensor, form: Form) -> Implementation:
    name, known = _DEFAULT if requested == "auto" else requested, _IMPLEMENTATIONS[op]
    if name == "auto":
        return _select_automatically(op, w, form)
    for each in known:
        if each.backend.name == name:
            if each.obstacles(w, form):
                raise BackendError(_refusal(op, (each,), w, form))
            return each
    names = [each.backend.name for each in known]
    guess = closest(name, names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    raise BackendError(f"`{op}` has no backend {name!r}; it has auto, {', '.join(names)}.{hint}")


def _select_automatically(op: str, w: Tensor, form: Form) -> Implementation:
    candidates = [each for each in _IMPLEMENTATIONS[op] if each.automatic(w.device.type)]
    for each in candidates:
        if not each.obstacles(w, form):
            if each is not candidates[0] and candidates[0].obstacles(w, _PLAIN):  # not for an option that it lacks
                _warn_once(op, each, candidates[0], w, form)
            return each
    raise BackendError(_refusal(op, _IMPLEMENTATIONS[op], w, form))


def _refusal(op: str, candidates: tuple[Implementation, ...], w: Tensor, form: Form) -> str:
    lines = [f"{each.backend.name}: {'; '.join(each.obstacles(w, form))}" for each in candidates]
    return (
        f"no backend can run `{op}` on these inputs:\n"
        f"    w  {tuple(w.shape)} {str(w.dtype).removeprefix('torch.')} on {w.device}\n"
        + "".join(f"  {line}\n" for line in lines)
        + '  fix: pass backend="reference" to run anywhere, or run `tost info` to see what is missing'
    )


def _warn_once(op: str, chosen: Implementation, faster: Implementation, w: Tensor, form: Form) -> None:
    if torch.compiler.is_compiling() or faster.backend.name in _WARNED:
        return
    _WARNED.add(faster.backend.name)
    warnings.warn(
        f"`{op}` runs on backend {chosen.backend.name!r}; {faster.backend.name!r} is faster but cannot be used: "
        f"{'; '.join(faster.obstacles(w, form))}. See `tost info`.",
        RuntimeWarning,
        stacklevel=6,
    )
