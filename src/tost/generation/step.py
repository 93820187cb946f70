"""The fastest step for a model: native, flat, or its own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.generation.decode import State, decode_step
from tost.generation.flat import FlatStep, StateForm, flat_obstacles
from tost.generation.native import WEIGHTS, NativeStep, Weights, native_obstacles
from tost.models import LanguageToST

Step = Callable[[Tensor, State | None], tuple[Tensor, State]]

# Rows from which on torch's matrix products are faster than reading each matrix once for all vectors.
_MANY = 32


def make_step(model: nn.Module, weights: Weights = "fp32") -> Step:
    """Return a function that does what `decode_step` does for one model.

    Args:
        model: A causal language model, whose parameters stay what they are for as long as the function is used.
        weights: How the matrices are stored; see `tost.generation.native.pack_rows`. Anything but ``"fp32"`` takes the
            native library.

    Raises:
        ConfigError: The weights cannot be stored like that, and why.
    """
    reasons = native_obstacles(model) if weights in WEIGHTS else [f"it takes one of {', '.join(WEIGHTS)}"]
    if weights != "fp32" and reasons:
        raise ConfigError(f"weights={weights!r} cannot be used: {'; '.join(reasons)}. Leave it out.")
    if flat_obstacles(model):
        return lambda tokens, state: decode_step(model, tokens, state)
    flat, form = FlatStep(cast(LanguageToST, model)), StateForm(cast(LanguageToST, model))
    native = None if reasons else NativeStep(cast(LanguageToST, model), weights)

    def step(tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        if state is None or not form.fits(tokens, state):  # the model explains what is wrong with it
            return decode_step(model, tokens, state)
        with torch.no_grad():
            if native is not None and (weights != "fp32" or tokens.shape[0] < _MANY):
                return native(tokens, state)
            return flat(tokens, state)

    return step
