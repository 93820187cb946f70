"""An exponential moving average of a model's weights.

``torch.optim.swa_utils.AveragedModel`` keeps a second module; a second set of tensors is all that is needed, works for
sharded parameters as it is, and can be swapped into the model for an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class WeightAverage:
    """``average = decay * average + (1 - decay) * weight`` for every trainable parameter.

    Args:
        model: The model whose parameters are followed.
        decay: How much of the average stays at each update, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights."""
        torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages into the model for the duration of a ``with`` block, and the weights back after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(kept)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over averages that were saved; every parameter must be there."""
        for name, average in self.average.items():
            whole = tensors[name].to(average.device)
            if isinstance(average, DTensor):
                whole = distribute_tensor(whole, average.device_mesh, average.placements)
            average.copy_(whole)
