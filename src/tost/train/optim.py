"""The optimizer and which parameters it decays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tost.train.config import OptimConfig

STATISTICS = ("temperature", "position_bias")
"""Parameters of the operator itself. They set the scale of memberships; decaying them flattens every head alike."""


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Sort the trainable parameters of a model into those that decay and those that do not.

    Matrices decay; vectors (biases, norms, layer scales) do not, nor does what the model's own ``no_weight_decay()``
    names, such as a class token. The operator's temperatures and position biases do not decay either, unless
    `decay_statistics` asks for the authors' vision training, where the optimizer never learned of their exemption.
    `decay_all` lets everything decay, as plain ``AdamW(model.parameters())`` does.

    With `slow_lr` set, what the model names in ``slow_parameters()`` has groups of its own. Their ``"scale"`` is the
    factor between their learning rate and that of the schedule.

    Args:
        model: The model.
        config: Learning rate and decay.

    Returns:
        One to four groups for a torch optimizer, parameters in the order of the model.
    """
    found: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    exempt = _named_by(inner, "no_weight_decay")
    slow = _named_by(inner, "slow_parameters") if config.slow_lr is not None else set()
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.rpartition(".")[2] in STATISTICS:
            decays = config.decay_statistics
        else:
            decays = parameter.dim() >= 2 and name not in exempt
        found.setdefault((name in slow, decays or config.decay_all), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for is_slow, decays in ((False, True), (False, False), (True, True), (True, False)):
        if parameters := found.get((is_slow, decays)):
            groups.append({"params": parameters, "weight_decay": config.weight_decay if decays else 0.0})
            if is_slow and config.slow_lr is not None:
                groups[-1]["scale"] = config.slow_lr / config.lr
    return groups


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its learning rate, where `lr` is that of the schedule."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)


def _named_by(model: nn.Module, method: str) -> set[str]:
    named: Callable[[], Iterable[str]] = getattr(model, method, tuple)
    return set(named())


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW over the groups of `parameter_groups`."""
    # The fused form makes one pass over the parameters and is several times faster than a loop, also on a CPU.
    return torch.optim.AdamW(
        parameter_groups(model, config), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
