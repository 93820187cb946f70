"""What a causal model carries from one piece of a sequence to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tost.ops import TSSAState

__all__ = ["ModelState"]


class ModelState(NamedTuple):
    """One `TSSAState` per layer: all that a causal model remembers, of a size that does not grow with the sequence.

    Like its parts it is never changed in place, and gradients flow through it.

    Attributes:
        layers: The states of the layers, from the first to the last; at least one.
    """

    layers: tuple[TSSAState, ...]

    @property
    def position(self) -> Tensor:
        """Number of tokens seen, padding not counted, int64 ``[B]``; every layer has seen the same ones."""
        return self.layers[0].position

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ModelState:
        """Return the state on another device or with sums of another dtype."""
        return ModelState(tuple(layer.to(device, dtype) for layer in self.layers))

    def detach(self) -> ModelState:
        """Return the state cut off from the graph that made it, as truncated back-propagation wants."""
        return ModelState(tuple(layer.detach() for layer in self.layers))
