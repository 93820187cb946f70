"""Batch norms that see the batch of all processes, so that a step does not depend on how many share it."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tost.nn.mixers import TokenBatchNorm
from tost.ops._numerics import statistics_dtype
from tost.parallel._autograd import sum_over_ranks
from tost.parallel._channel import Channel


class SharedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the samples of all processes; parameters and statistics have the names of the plain one.

    torch has this as ``SyncBatchNorm``, for graphics cards only. A process of a run on CPUs uses this one.
    """

    channel: Channel

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x ``[B, C, height, width]`` by the mean and variance of each channel over all processes."""
        if not self.training:
            return super().forward(x)
        wide = x.to(statistics_dtype(x.dtype))
        count = wide.new_tensor(x.numel() // x.shape[1])
        total = sum_over_ranks(count, self.channel)
        mean = sum_over_ranks(wide.sum(dim=(0, 2, 3)), self.channel) / total
        centred = wide - mean.view(1, -1, 1, 1)
        variance = sum_over_ranks(centred.square().sum(dim=(0, 2, 3)), self.channel) / total
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        unbiased = variance.detach() * (total / (total - 1))
        self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)).to(x.dtype)


def share_batch_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """Let the batch norms of a model use the samples of all processes; the other modules stay as they are.

    Args:
        model: The model, the same on every process.
        device: Where it will run.

    Returns:
        The model.
    """
    assert dist.group.WORLD is not None
    channel = Channel(dist.group.WORLD)
    for module in model.modules():
        if isinstance(module, TokenBatchNorm):
            module.share(partial(sum_over_ranks, channel=channel))
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for module in model.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats:
            module.__class__ = SharedBatchNorm2d  # the same parameters, in the same places, with another rule
            setattr(module, "channel", channel)  # noqa: B010
    return model
