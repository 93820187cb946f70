"""The optimizer, the learning rate of every step, and an average of the weights.

Learning rates are functions of the step rather than torch schedulers, in the exact forms of the code bases that the
paper's experiments use, without state to save or restore. The average is a second set of tensors rather than the
second module of ``torch.optim.swa_utils.AveragedModel``: it works for sharded parameters as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tost.train.config import OptimConfig, ScheduleConfig

STATISTICS = ("temperature", "position_bias")
"""Parameters of the operator itself. They set the scale of memberships; decaying them flattens every head alike."""


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Sort the trainable parameters of a model into those that decay and those that do not.

    Matrices decay; vectors (biases, norms, layer scales) do not, nor does what the model's own ``no_weight_decay()``
    names, such as a class token. The operator's temperatures and position biases do not decay either, unless
    `decay_statistics` asks for the authors' vision training, where the optimizer never learned of their exemption.
    `decay_all` lets everything decay, as plain ``AdamW(model.parameters())`` does.

    With `slow_lr` set, the parameters in the model's ``slow_parameters()`` form separate groups. Their ``"scale"`` is
    the ratio of their learning rate to the scheduled one.

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
    """Set the learning rate of every group from the scheduled rate `lr`."""
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


def learning_rate(step: int, *, config: ScheduleConfig, peak: float, total: int) -> float:
    """Return the learning rate of a step.

    Args:
        step: Steps done before this one: 0 for the first.
        config: The form and its numbers.
        peak: The highest rate, reached at the end of the warm-up.
        total: Steps of the whole run.

    Returns:
        The rate that step `step` uses.
    """
    t, warmup = step, config.warmup_steps
    if config.epoch_steps:  # constant during an epoch
        t = max(0, step // config.epoch_steps - config.lag) * config.epoch_steps
    if config.name == "one_cycle":
        return _one_cycle(t, warmup, peak, total)
    if t < warmup and config.warmup_first_step == "zero":  # fairseq, older nanoGPT: the first is at the starting rate
        return config.warmup_from + t * (peak - config.warmup_from) / warmup
    if t < warmup:
        return peak * (t + 1) / (warmup + 1)  # nanoGPT today: no step is lost at rate 0
    begin = warmup if config.decay_from == "warmup" else 0
    progress = min(1.0, (t - begin) / max(1, total - begin))
    match config.name:
        case "constant":
            return peak
        case "cosine":
            return config.min_lr + 0.5 * (peak - config.min_lr) * (1 + math.cos(math.pi * progress))
        case "linear":
            return config.min_lr + (peak - config.min_lr) * (1 - progress)
        case "inverse_sqrt":
            return max(config.min_lr, peak * math.sqrt(max(1, warmup) / max(1, t)))
    raise AssertionError(config.name)


def _one_cycle(t: int, warmup: int, peak: float, total: int) -> float:
    """Linear from peak / 25 up to the peak and down to peak / 250,000, with the ends that torch's OneCycleLR has."""
    start, end = peak / 25, peak / 250_000
    top, bottom = max(1, warmup - 1), max(1, total - 1)
    if t <= top:
        return start + (peak - start) * t / top
    return peak + (end - peak) * min(1.0, (t - top) / max(1, bottom - top))


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
