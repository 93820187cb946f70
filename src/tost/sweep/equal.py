"""Equal parameters for the arms of a sweep, by the width of their MLPs. Loads torch when it is called."""

from __future__ import annotations

from typing import Any

from tost.errors import ConfigError
from tost.train.config import RunConfig


def equal_width(settings: RunConfig, like: RunConfig) -> str:
    """Return the change, ``model.mlp_ratio=...``, that gives a model about as many parameters as another one has.

    The MLPs make up for what the mixers differ by. Their width is a whole number, so up to half of what one unit of
    width costs is left over.

    Args:
        settings: What is changed.
        like: What it should be as large as.

    Raises:
        ConfigError: The model has no option `mlp_ratio`, or is too large without any MLP.
    """
    wanted, C = parameters(like), settings.model.options.get("embed_dim")
    if "mlp_ratio" not in settings.model.options or not isinstance(C, int):
        raise ConfigError(f"{settings.model.name} has no mlp_ratio, by which the plan makes parameters equal")
    one, two = (parameters(settings, mlp_ratio=float(ratio)) for ratio in (1, 2))
    hidden = C + round((wanted - one) / ((two - one) / C))
    if hidden < 1:
        raise ConfigError(f"without MLPs it still has more than the {wanted:,} parameters that the plan asks for")
    return f"model.mlp_ratio={hidden / C!r}"


def parameters(settings: RunConfig, **changes: Any) -> int:
    """Return how many parameters the model of a configuration has, without using memory for them."""
    import torch

    from tost.models import create_model

    with torch.device("meta"):
        model = create_model(settings.model.name, **{**settings.model.options, **changes})
    return sum(p.numel() for p in model.parameters())
