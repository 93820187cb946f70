"""How many tokens a statistic is taken over: t without forgetting, ``1 + a + ... + a^(t-1)`` with it.

The closed form ``(1 - a^t) / (1 - a)`` is 0 / 0 at a = 1 and loses digits near it, its derivative even more. Here both
are found without a difference of nearly equal numbers, from ``x = log(a)`` (accurate near 1, since a is given):

    count = expm1(t x) / (a - 1)             a - 1 is exact for a >= 1/2
    d count / da = count (t h(t x) - h(x)) / a,      h(x) = 1 / (1 - exp(-x)) - 1 / x = 1/2 + x/12 - x^3/720 + ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tost.ops._transforms import is_transformed

# Coefficients of x, x^3, x^5, ... in h(x) - 1/2: Bernoulli numbers over factorials. Below 1/2 the rest is < 1e-16.
_SERIES = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000, 1 / 74724249600)


def effective_count(decay: Tensor, count: Tensor) -> Tensor:
    """Return ``sum_{k < t} decay^k`` for every count t and head, differentiable in the decay.

    Args:
        decay: One number in (0, 1] per head, ``[H]``, in the dtype of the statistics.
        count: Numbers of tokens, at least 1, integers of any shape ``[...]``.

    Returns:
        ``[..., H]`` in the dtype of `decay`.
    """
    return _count(decay, count.to(decay.dtype).unsqueeze(-1))


def _count(decay: Tensor, t: Tensor) -> Tensor:
    function = _TransformedCount if is_transformed() else _EffectiveCount
    return function.apply(decay, t)  # type: ignore[no-untyped-call]


class _EffectiveCount(torch.autograd.Function):
    """Keeps the decay and the counts only; derivatives are made of differentiable pieces."""

    generate_vmap_rule = True

    @staticmethod
    def forward(decay: Tensor, t: Tensor) -> Tensor:
        return torch.where(decay == 1, t, torch.expm1(t * decay.log()) / (decay - 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        decay, t = ctx.saved_tensors
        return (grad * _slope(decay, t)).sum_to_size(decay.shape), None


class _TransformedCount(_EffectiveCount):
    """The same with a forward-mode derivative, which ``torch.compile`` refuses to see."""

    @staticmethod
    def jvp(ctx: Any, d_decay: Tensor | None, _: None) -> Tensor | None:
        return None if d_decay is None else d_decay * _slope(*ctx.saved_tensors)


def _slope(decay: Tensor, t: Tensor) -> Tensor:
    """Return d count / da: as above near 1, directly for small a, where dividing by a would magnify rounding."""
    near = decay >= 0.5
    # Where a branch is not taken it is fed a harmless number: nothing infinite may reach its derivative.
    a = decay.where(near, 1)
    x = a.log()
    by_series = _count(a, t) * (t * _h(t * x) - _h(x)) / a
    a = decay.where(~near, 0.25)
    directly = (1 - a**t - t * a ** (t - 1) * (1 - a)) / (1 - a).square()
    return by_series.where(near, directly)


def _h(x: Tensor) -> Tensor:
    small = x > -0.5
    y = x.where(small, 0)
    series = torch.zeros_like(y)
    for coefficient in reversed(_SERIES):
        series = series * y.square() + coefficient
    z = x.where(~small, -1)
    return torch.where(small, 0.5 + y * series, z.exp() / torch.expm1(z) - 1 / z)
