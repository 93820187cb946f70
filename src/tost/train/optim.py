"""The optimiser and which parameters it decays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tost.train.config import OptimConfig

__all__ = ["build_optimizer", "parameter_groups"]

STATISTICS = ("temperature", "position_bias")
"""Parameters of the operator itself. They set the scale of memberships; decaying them flattens every head alike."""


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Sort the trainable parameters of a model into those that decay and those that do not.

    Matrices decay; vectors (biases, norms, layer scales) do not, nor does what the model's own ``no_weight_decay()``
    names, such as a class token. The operator's temperatures and position biases do not decay either, unless
    `decay_statistics` asks for the authors' vision training, where the optimiser never learned of their exemption.
    `decay_all` lets everything decay, as plain ``AdamW(model.parameters())`` does.

    Args:
        model: The model.
        config: Learning rate and decay.

    Returns:
        One or two groups for a torch optimiser, parameters in the order of the model.
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    named: Callable[[], Iterable[str]] = getattr(inner, "no_weight_decay", tuple)
    exempt = set(named())
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.rpartition(".")[2] in STATISTICS:
            decays = config.decay_statistics
        else:
            decays = parameter.dim() >= 2 and name not in exempt
        (decayed if decays or config.decay_all else spared).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW over the groups of `parameter_groups`."""
    # The fused form makes one pass over the parameters and is several times faster than a loop, also on a CPU.
    return torch.optim.AdamW(
        parameter_groups(model, config), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
