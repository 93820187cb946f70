"""What a causal model carries from one piece of a sequence to the next.

Every state here is a tuple of tensors, or of such tuples, with the batch as the first axis: code that moves, selects or
stores states needs to know no more than that. None is ever changed in place, and gradients flow through all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tost._text import html_card
from tost.ops import GatedState, Packing, TSSAState
from tost.ops._numerics import statistics_dtype


class KVState(NamedTuple):
    """What causal softmax attention remembers: every token it has seen, so it grows with the sequence.

    Without gradients the keys and values of later states lie in one buffer, which has room for more: a token is added
    without copying those before it.

    Attributes:
        keys: ``[B, H, M, D]`` for M tokens, padding included.
        values: ``[B, H, M, D]``.
        real: Which of them are no padding, bool ``[B, M]``; ``[B, 0]`` as long as all are.
        position: Number of tokens seen, padding not counted, int64 ``[B]``.
    """

    keys: Tensor
    values: Tensor
    real: Tensor
    position: Tensor


class RecurrentState(NamedTuple):
    """What the recurrent baselines remember.

    Attributes:
        memory: Numbers whose meaning is that of the mixer, ``[B, ...]``, float32 or better.
        position: Number of tokens seen, padding not counted, int64 ``[B]``.
    """

    memory: Tensor
    position: Tensor

    @classmethod
    def empty(cls, x: Tensor, *shape: int) -> RecurrentState:
        """Return the state before the first token of x [B, ...], with a memory of this shape per sequence."""
        memory = x.new_zeros(x.shape[0], *shape, dtype=statistics_dtype(x.dtype))
        return cls(memory, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device))


MixerState: TypeAlias = TSSAState | GatedState | KVState | RecurrentState


class BlockState(NamedTuple):
    """The state of a block with causal convolutions.

    Attributes:
        mixer: The state of its attention.
        windows: For each convolution the last tokens it has seen, ``[B, width - 1, C]``; zeros before the first.
    """

    mixer: MixerState
    windows: tuple[Tensor, ...]

    @property
    def position(self) -> Tensor:
        """Number of tokens seen, padding not counted, int64 ``[B]``."""
        return self.mixer.position


class ModelState(NamedTuple):
    """One state per layer: all that a causal model remembers.

    With TSSA its size does not depend on the length of the sequence, with or without convolutions.

    Attributes:
        layers: The states of the layers, from the first to the last; at least one.
    """

    layers: tuple[MixerState | BlockState, ...]

    @property
    def position(self) -> Tensor:
        """Number of tokens seen, padding not counted, int64 ``[B]``; every layer has seen the same ones."""
        return self.layers[0].position

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ModelState:
        """Return the state on another device or with numbers of another dtype; counts stay integers."""

        def move(x: Tensor) -> Tensor:
            return x.to(device=device, dtype=dtype if x.is_floating_point() else None)

        return _map(move, self)

    def detach(self) -> ModelState:
        """Return the state cut off from the graph that made it, as truncated back-propagation wants."""
        return _map(Tensor.detach, self)

    def select(self, rows: Tensor | Sequence[int]) -> ModelState:
        """Return the states of some sequences of the batch.

        Args:
            rows: Which, in the order wanted, int64 ``[R]``. One may be taken several times, as beams are.
        """
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.position.device)
        return _map(lambda x: x.index_select(0, index), self)

    def go_on(self, rows: Tensor) -> ModelState:
        """Return the states at the start of sequences, some of which continue from these.

        Args:
            rows: The sequence that each of them goes on from, int64 ``[S]``; -1 for one that begins.
        """

        def begin(x: Tensor) -> Tensor:
            return torch.cat((torch.zeros_like(x[:1]), x)).index_select(0, rows + 1)

        return _map(begin, self)

    def bytes(self) -> int:
        """Return the memory that the state takes."""
        return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(self))

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        mixers = {type(layer.mixer if isinstance(layer, BlockState) else layer).__name__ for layer in self.layers}
        entries = {"layers": f"{len(self.layers)} ({', '.join(sorted(mixers))})", "bytes": f"{self.bytes():,}"}
        return html_card("State of a model", {"tokens seen": self.position.tolist(), **entries})


class Carry:
    """Hands a state to the ``forward`` of a module, which leaves the state after its tokens in its place.

    A state that travels like this goes through ``module(...)``, as any other input does: hooks fire, and whatever
    wraps ``forward`` sees the call.

    Args:
        state: The state returned with the tokens before; None at the start.
    """

    def __init__(self, state: Any = None) -> None:
        self.state = state


State = TypeVar("State")


class Continues(Generic[State]):
    """A causal module that can continue a sequence: its ``forward`` takes a `Carry`."""

    def forward_with_state(
        self, x: Tensor, state: State | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Continue sequences of which `state` has seen the beginning.

        Args:
            x: The next tokens, ``[B, N, C]``.
            state: The state returned with the tokens before; None at the start.
            mask: Real tokens, bool ``[B, N]``.

        Returns:
            ``[B, N, C]`` and the state after these tokens.

        Raises:
            ValueError: As in `forward`, or the state belongs to another batch or another kind of module.
            BackendError: As in `forward`.
        """
        return _call_with_state(cast(nn.Module, self), x, state, mask)


class ContinuesPacked(Generic[State]):
    """The same for a module that knows packed sequences."""

    def forward_with_state(
        self, x: Tensor, state: State | None = None, mask: Tensor | None = None, *, packing: Packing | None = None
    ) -> tuple[Tensor, State]:
        """Continue sequences as `Continues` does; with a packing, states have an entry for each of its sequences."""
        return _call_with_state(cast(nn.Module, self), x, state, mask, packing)


def _call_with_state(
    module: nn.Module, x: Tensor, state: Any, mask: Tensor | None, packing: Packing | None = None
) -> tuple[Tensor, Any]:
    """Call ``module(x, mask, carry=...)``, with a packing if there is one; return the output and the state after x."""
    carry = Carry(state)
    if packing is None:
        return module(x, mask, carry=carry), carry.state
    return module(x, mask, packing=packing, carry=carry), carry.state


def _map(function: object, state: ModelState) -> ModelState:
    return pytree.tree_map(function, state)  # type: ignore[arg-type]
