"""The correspondence between the authors' tensors and ours, as a table that is read in both directions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tost.errors import CheckpointError
from tost.models.options import ModelOptions

State = Mapping[str, Tensor]

# With more problems than this, names are left out.
_SHOWN = 40


@dataclass(frozen=True)
class Pair:
    """One tensor of theirs and what it is here.

    Attributes:
        theirs: Their name.
        ours: Our names. If there are several, their tensors are concatenated along the first axis of theirs.
        ones: Axes of length 1 that theirs has behind ours.
    """

    theirs: str
    ours: tuple[str, ...]
    ones: int = 0


class Layout(ABC):
    """How the authors store one kind of model."""

    kind: ClassVar[str]
    """What these models are called in messages."""
    options: ClassVar[type[ModelOptions]]
    """Options of our models that it corresponds to."""

    @abstractmethod
    def likeness(self, state: State) -> int:
        """Count the names that only a model of this kind has."""

    @abstractmethod
    def canonical(self, state: State) -> dict[str, Tensor]:
        """Give every tensor the name that the table knows it by."""

    @abstractmethod
    def told(self, state: State) -> dict[str, Any]:
        """Return the options that the tensors, under their canonical names, leave no choice about."""

    @abstractmethod
    def assumed(self, state: State) -> dict[str, Any]:
        """Return further options that the authors' code has, which the tensors do not tell."""

    @abstractmethod
    def pairs(self, options: Any) -> list[Pair]:
        """Return the table for a model with these options."""

    @abstractmethod
    def lacks(self, options: Any) -> list[str]:
        """Say which of our options the authors' code lacks, though the tensors would not tell."""

    def complete(self, tensors: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
        """Add what the authors' files hold twice."""
        return tensors


def affine(theirs: str, *ours: str, bias: bool = True) -> list[Pair]:
    """Pair the weight, and the bias if there is one, of a linear layer or a norm."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Pair(f"{theirs}.{kind}", tuple(f"{name}.{kind}" for name in ours)) for kind in kinds]


def first(state: State, start: str, end: str) -> Tensor | None:
    """Return the first tensor whose name starts and ends like this; None if there is none."""
    return next((tensor for name, tensor in state.items() if name.startswith(start) and name.endswith(end)), None)


def rows(tensor: Tensor | None) -> int:
    """Return the length of a tensor's first axis; 0 if there is none."""
    return 0 if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def count_blocks(state: State, prefix: str) -> int:
    """Count the different numbers behind `prefix`.

    The count and not the highest one: otherwise a single odd name could ask for a million blocks.
    """
    found = {name.removeprefix(prefix).partition(".")[0] for name in state if name.startswith(prefix)}
    return sum(number.isdecimal() for number in found)


def changed_options(options: ModelOptions, free: Iterable[str]) -> list[str]:
    """Return ``name=value`` of each option that differs from its default, apart from those that are `free` to."""
    fields = type(options).model_fields
    chosen = {name: getattr(options, name) for name in fields if name not in set(free)}
    return [f"{name}={value}" for name, value in chosen.items() if value != fields[name].default]


def list_names(names: Iterable[str]) -> str:
    """Join names, but not more than anybody reads."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def to_ours(pairs: Sequence[Pair], state: State, model: nn.Module, what: str) -> dict[str, Tensor]:
    """Turn their tensors into ours.

    Args:
        pairs: The table for this model.
        state: Their tensors.
        model: Ours, which says what shapes are needed.
        what: What the tensors were taken for, for messages.

    Returns:
        Tensors by our names, with memory of their own.

    Raises:
        CheckpointError: A tensor is missing, of the wrong shape or kind, or would not be used; all of them are listed.
    """
    needed = model.state_dict()
    names = {pair.theirs for pair in pairs}
    missing = [pair.theirs for pair in pairs if pair.theirs not in state]
    unused = [name for name in state if name not in names]
    wrong: list[str] = []
    result: dict[str, Tensor] = {}
    for pair in pairs:
        if pair.theirs not in state:
            continue
        tensor, places = state[pair.theirs], [needed[name] for name in pair.ours]
        if problem := _misfit(tensor, places, pair.ones):
            wrong.append(f"{pair.theirs} {problem}")
            continue
        pieces = tensor.detach().chunk(len(places)) if len(places) > 1 else (tensor.detach(),)
        for name, piece, place in zip(pair.ours, pieces, places, strict=True):
            # A model owns its memory: pieces share theirs with each other, and the caller's tensors with the caller.
            result[name] = piece.reshape(place.shape).clone(memory_format=torch.contiguous_format)
    if missing or unused or wrong:
        raise CheckpointError(_refusal(what, missing, unused, wrong))
    return result


def to_theirs(pairs: Sequence[Pair], state: State) -> dict[str, Tensor]:
    """Turn our tensors into theirs, with memory of their own.

    Raises:
        CheckpointError: Our tensors have no place in their models, or theirs are missing; all are listed.
    """
    covered = [name for pair in pairs for name in pair.ours]
    strange, missing = [name for name in state if name not in set(covered)], [n for n in covered if n not in state]
    if strange:
        raise CheckpointError(f"the authors' models have no place for {list_names(strange)}")
    if missing:
        raise CheckpointError(f"this model has been changed since it was built, it lacks {list_names(missing)}")
    result: dict[str, Tensor] = {}
    for pair in pairs:
        parts = [state[name].detach() for name in pair.ours]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
        result[pair.theirs] = whole.reshape((*whole.shape, *(1,) * pair.ones))
    return result


def _misfit(tensor: Tensor, places: Sequence[Tensor], ones: int) -> str | None:
    """Return why their tensor cannot be split into our tensors; None if it can."""
    if places[0].is_floating_point() and not tensor.is_floating_point():
        return f"has dtype {tensor.dtype}; a floating-point type is needed"
    if not places[0].is_floating_point() and tensor.dtype != places[0].dtype:
        return f"has dtype {tensor.dtype}; {places[0].dtype} is needed"
    shape = tuple(places[0].shape)
    whole = (len(places) * shape[0], *shape[1:]) if shape else ()
    # Axes of length 1 at the end carry nothing, and come and go between versions of the code.
    accepted = {whole, (*whole, 1), (*whole, 1, 1)} if ones else {whole}
    if tuple(tensor.shape) in accepted:
        return None
    return f"has shape {tuple(tensor.shape)}; {whole + (1,) * ones} is needed"


def _refusal(what: str, missing: Sequence[str], unused: Sequence[str], wrong: Sequence[str]) -> str:
    lines = [f"this is not a whole checkpoint of the authors' {what}, so nothing was loaded:"]
    lines += [f"missing: {list_names(missing)}"] if missing else []
    lines += [f"not used: {list_names(unused)}"] if unused else []
    lines += wrong[:_SHOWN]
    return "\n  ".join(lines)
