"""Picks the fastest way to advance a model by one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from tost.generate.decode import State, decode_step
from tost.generate.flat import FlatStep, why_not
from tost.models import LanguageToST

__all__ = ["Step", "make_step"]

Step = Callable[[Tensor, State | None], tuple[Tensor, State]]


def make_step(model: nn.Module) -> Step:
    """Return a function that does what `decode_step` does for one model.

    Args:
        model: A causal language model, whose parameters stay the same tensors for as long as the function is used.
    """
    flat = None if why_not(model) else FlatStep(cast(LanguageToST, model))

    def step(tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        if flat is None or state is None:
            return decode_step(model, tokens, state)
        with torch.no_grad():
            return flat(tokens, state)

    return step
