"""The interface between models and tasks: required methods, and optional ones. Loads no torch.

A model is a ``torch.nn.Module`` that is called according to its task:

* ``classification``: ``model(x) -> logits [B, K]`` from ids ``[B, N]`` or values ``[B, N, F]``; ``model(x, mask=mask)``
  if the data has padding, with True for real elements.
* ``image_classification``: ``model(images) -> logits [B, K]`` from ``[B, channels, height, width]``.
* ``language_modeling``: ``model(ids) -> logits [B, N, V]``, and ``model(ids, targets=targets)``, which returns the
  cross-entropy summed over all targets but -100. To generate, ``forward_with_state(ids, state, mask)``, as in
  `LanguageToST`, and ``options`` with `vocab_size` and `max_length`.

Everything else is optional. The functions here are the only places that look for it, apart from the optimizer, which
calls ``no_weight_decay()`` and ``slow_parameters()`` for the names of parameters that do not decay or that learn at
``optim.slow_lr``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from torch import nn

_NOTED = "_tost_options"


def note_options(model: nn.Module, options: BaseModel) -> None:
    """Remember the options that a model was made with, for models that do not keep them."""
    object.__setattr__(model, _NOTED, options)


def model_options_of(model: nn.Module) -> BaseModel | None:
    """Return the options of a model: its ``options``, else those that `create_model` made it with; None if unknown."""
    own = getattr(model, "options", None)
    return own if isinstance(own, BaseModel) else getattr(model, _NOTED, None)


def flops_per_token(model: nn.Module) -> int | None:
    """Return the operations of a forward pass per token, from ``model.flops_per_token()``; None if unknown."""
    return _counted(model, "flops_per_token")


def flops_per_image(model: nn.Module, height: int, width: int) -> int | None:
    """Return the operations of a forward pass for an image, from ``model.flops_per_image``; None if unknown."""
    return _counted(model, "flops_per_image", height, width)


def _counted(model: nn.Module, method: str, *arguments: int) -> int | None:
    count = getattr(model, method, None)
    try:
        found: int | None = count(*arguments) if callable(count) else None
    except NotImplementedError:
        return None
    return found
