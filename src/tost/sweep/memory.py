"""What the arms of a sweep remember of a text, and a picture of what they reach with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tost.errors import ConfigError
from tost.sweep.plan import Plan
from tost.train.config import RunConfig


def state_bytes(settings: RunConfig) -> int | None:
    """Return how many bytes the mixers of a language model keep after one sample of the data, without computing it.

    Windows of convolutions and counts of tokens are left out, which do not depend on the mixer.

    Args:
        settings: Configuration of a run.

    Returns:
        The size of the state of one sequence, over all layers; None if the mixer has no state.
    """
    import torch
    from torch.utils import _pytree as pytree

    from tost.models import create_model
    from tost.nn import BlockState

    with torch.device("meta"):
        model: Any = create_model(settings.model.name, **settings.model.options)
        ids = torch.zeros(1, settings.data.shape().length or 1, dtype=torch.int64)
    try:
        _, state = model.forward_with_state(ids)
    except ConfigError:
        return None
    layers = [layer.mixer if isinstance(layer, BlockState) else layer for layer in state.layers]
    numbers: list[torch.Tensor] = [x for x in pytree.tree_leaves(layers) if x.is_floating_point()]
    return sum(x.numel() * x.element_size() for x in numbers)


def state_picture(results: Mapping[str, Any]) -> bytes | None:
    """Draw the metric of every arm over the size of its state; over several tasks, a panel for each.

    Args:
        results: What `tost.sweep.collect` gathered.

    Returns:
        The content of an SVG file, the same for the same results; None if the plan does not ask for the states, or
        nothing is finished.
    """
    plan = Plan.model_validate(results["plan"])
    panels: dict[str, dict[str, Any]] = {}
    for arm, found in results["arms"].items():
        if (size := found.get("state_bytes")) is not None and (spread := found["metrics"].get(plan.metric)):
            task, setting = plan.task_of(arm)
            mean, low, high = (spread[key] * plan.shown for key in ("mean", "min", "max"))
            panels.setdefault(task, {})[setting] = (size, mean, (low, high))
    if not panels:
        return None
    from tost.analysis.figures.sizes import draw_sizes

    unit = f"{plan.metric} %" if plan.percent else plan.metric
    return draw_sizes(panels, title=plan.title, x="state of one sequence, bytes", y=unit)
