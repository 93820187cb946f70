"""The authors' checkpoints, both ways: into models of this package, and back into their code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tost.errors import CheckpointError, ConfigError
from tost.integrations.official._layouts import (
    HEAD,
    TOKENS,
    LanguageLayout,
    Layout,
    VisionLayout,
    lacking,
    list_names,
    to_ours,
    to_theirs,
)
from tost.integrations.official._read import Source, read_state
from tost.models import create_model, model_options
from tost.models.options import ModelOptions
from tost.train.checkpoint.model import nearest_model

__all__ = ["load_official", "to_official"]

_LAYOUTS: tuple[Layout, ...] = (LanguageLayout(), VisionLayout())


def load_official(
    path_or_state_dict: Source, *, weights: Literal["model", "ema"] = "model", **overrides: Any
) -> nn.Module:
    """Build the model that a checkpoint of the authors holds, with its weights.

    Vision models (``tost_cab_*``, ``xcit_cab_*``, ``vit_cab_*``) and language models (``model_TSSA.py``, and the GPT
    with softmax attention that it is compared with) are recognized by their names, and their sizes by their shapes.
    Every tensor of the checkpoint is used, and every parameter of the model comes from it; if that is not possible,
    nothing is loaded and the error lists the differences. Weights keep their type, so a checkpoint in half precision
    gives a model in half precision.

    A few things are not in the tensors, or need a rule:

    * the number of heads of softmax attention is 8 in vision models (``vit_cab_*``), and that of heads of width 64 in
      language models, unless `num_heads` is given;
    * class attention normalizes all tokens (`tokens_norm`), as in every registered model, unless it is set to False;
    * query and key biases that are missing everywhere are zero;
    * a position bias that is longer than the table of positions is cut: the authors' ``crop_block_size`` forgets it.

    Args:
        path_or_state_dict: A file in PyTorch's format or safetensors: the weights, or a dictionary that holds them, as
            the authors' programs write. Or what such a file holds, already loaded. A pickle is read with PyTorch's
            restricted reader, which runs no code.
        weights: ``"ema"`` takes the moving average of the weights, which their vision training can store.
        **overrides: Options of the model. Those that matter to training, such as `drop_path`, are free; those that
            the file tells have to agree with it.

    Returns:
        The model, in evaluation mode; call ``train()`` before training it.

    Raises:
        CheckpointError: The file cannot be read, is not such a checkpoint, or contradicts an override.
        ConfigError: An override is not an option of the model, or has a value that it cannot take.

    Example:
        >>> import tost
        >>> from tost.integrations.official import to_official
        >>> sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4, "vocab_size": 256}
        >>> model = tost.create_model("tost_lm_base", **sizes, position="learned")
        >>> again = tost.load_official(to_official(model), dropout=0.1)
        >>> again.options.depth, again.options.dropout
        (2, 0.1)
    """
    state = read_state(path_or_state_dict, weights)
    layout = _find_layout(state)
    state = layout.canonical(state)
    name, options = _decide(layout, state, overrides)
    with torch.device("meta"):
        model = create_model(name, **options.model_dump())
    pairs = layout.pairs(options)
    if extra := set(model.state_dict()) - {ours for pair in pairs for ours in pair.ours}:
        raise CheckpointError(
            f"the overrides ask for parameters that the authors' models do not have: {list_names(sorted(extra))}"
        )
    model.load_state_dict(to_ours(pairs, state, model, f"{layout.kind} models"), strict=True, assign=True)
    return model.eval()


def to_official(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights under the names and shapes of the authors' code.

    The inverse of `load_official`: ``their_model.load_state_dict(to_official(model))`` works, and loading the result
    here again gives the same model, bit by bit.

    Args:
        model: A `VisionToST` with TSSA, cross-covariance or softmax attention, or a `LanguageToST`.

    Returns:
        Their state dict, with memory of its own.

    Raises:
        CheckpointError: The model has options that the authors' code lacks, or is of another kind.
    """
    options = getattr(model, "options", None)
    layout = next((layout for layout in _LAYOUTS if type(options) is layout.options), None)
    if layout is None or not isinstance(options, ModelOptions):
        raise CheckpointError(
            f"the authors have no model like {type(model).__name__}; vision models (VisionToST) and language models "
            "(LanguageToST) can be converted"
        )
    if missing := lacking(layout, options):
        raise CheckpointError(
            f"the authors' code has no {' and no '.join(missing)}: it could not compute what this model does"
        )
    tensors = to_theirs(layout.pairs(options), model.state_dict())
    # The authors' state dict names the head besides the embedding that it is.
    return {**tensors, HEAD: tensors[TOKENS]} if isinstance(layout, LanguageLayout) else tensors


def _find_layout(state: Mapping[str, Tensor]) -> Layout:
    if any(".attention.proj_in." in name for name in state):
        raise CheckpointError(
            "this is a state dict of this package, not of the authors; use tost.load_model for a folder, or "
            "tost.create_model and load_state_dict"
        )
    layout = max(_LAYOUTS, key=lambda layout: layout.likeness(state))
    if layout.likeness(state):
        return layout
    raise CheckpointError(
        "these are neither the authors' vision models (names such as patch_embed.proj.0.0.weight) nor their language "
        f"models (transformer.wte.weight); the names here are {list_names(list(state)[:8])}"
    )


def _decide(layout: Layout, state: Mapping[str, Tensor], overrides: Mapping[str, Any]) -> tuple[str, ModelOptions]:
    """Return the registered name that is nearest to the model, and all its options."""
    decided, assumed = layout.read(state)
    defaults = {name: field.default for name, field in layout.options.model_fields.items() if not field.is_required()}
    found = {**defaults, **assumed, **decided}
    name = nearest_model(layout.options, found)
    wrong = [
        f"{key}={overrides[key]} (the file: {value})"
        for key, value in decided.items()
        if overrides.get(key, value) != value
    ]
    if "layer_scale" in overrides and (overrides["layer_scale"] is None) != (found["layer_scale"] is None):
        gammas = "without gammas" if found["layer_scale"] is None else "with gammas"
        wrong.append(f"layer_scale={overrides['layer_scale']} (the file: {gammas})")
    if wrong:
        raise CheckpointError(
            f"what was asked for contradicts the checkpoint: {', '.join(wrong)}. Leave it out, and change the model "
            "after it is loaded if need be"
        )
    try:
        return name, cast(ModelOptions, model_options(name, {**found, **overrides}))
    except ConfigError as error:
        if overrides:
            raise
        heads = found["num_heads"]
        guess = "" if "num_heads" in decided else f" (num_heads={heads} is a guess: no tensor has it; give it)"
        raise CheckpointError(f"the sizes in the checkpoint make no model{guess}: {error}") from None
