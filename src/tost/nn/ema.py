"""Damped moving averages along the tokens (Mega); an extension to the paper's models.

Shapes: x [B, N, C] (batch, tokens, width), parameters [R, C, S] with R directions and S averages per feature,
mask [B, N].
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from tost.nn._factory import Factory
from tost.nn.mixers._order import OrderedMixer
from tost.nn.mixers.s4 import long_convolution
from tost.ops._numerics import statistics_dtype


class DampedEMA(OrderedMixer):
    """Damped exponential moving averages of every feature, forwards and backwards (Ma et al., 2023).

    .. code-block:: text

        f[n, s] = alpha[0, s] x[n]     + (1 - alpha[0, s] delta[0, s]) f[n - 1, s]          for every feature of x
        g[n, s] = alpha[1, s] x[n + 1] + (1 - alpha[1, s] delta[1, s]) g[n + 1, s]          alpha, delta in (0, 1)
        y[n]    = sum_s weight[0, s] f[n, s] + weight[1, s] g[n, s]

    A token is part of its forward average only, so that it counts once. A `Block` adds the result to what its attention
    sees, so there is no direct share of x. Mega's input and output weights of an average act only as their product,
    which is one parameter here.

    The recurrence is a convolution, ``kernel[t] = sum_s weight[s] alpha[s] (1 - alpha[s] delta[s])^t``, computed by a
    Fourier transform. The averages of a feature start with half-lives from 1 to 70 tokens. Tokens that a mask leaves
    out are passed over, so a mask is a deletion.

    Args:
        embed_dim: Width of the tokens, C.
        num_averages: Averages per feature and direction, S.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        ValueError: There is no average.

    Example:
        >>> import torch, tost
        >>> tost.nn.DampedEMA(64, num_averages=4)(torch.randn(2, 15, 64)).shape
        torch.Size([2, 15, 64])
    """

    rates: ClassVar[tuple[str, ...]] = ("alpha", "delta")
    """Parameters that set the rates, as logits; they are not to decay."""

    def __init__(self, embed_dim: int, *, num_averages: int = 4, **factory: Unpack[Factory]) -> None:
        super().__init__()
        if num_averages < 1:
            raise ValueError(f"num_averages={num_averages} leaves nothing; use at least 1, such as 4.")
        self.embed_dim, self.num_averages = embed_dim, num_averages
        shape = (2, embed_dim, num_averages)
        self.alpha, self.delta, self.weight = (nn.Parameter(torch.empty(shape, **factory)) for _ in range(3))
        with torch.no_grad():
            self.alpha.copy_(torch.logspace(-1.7, -0.05, num_averages, device=self.alpha.device).logit().expand(shape))
            nn.init.zeros_(self.delta)
            nn.init.normal_(self.weight, std=num_averages**-0.5)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"embed_dim={self.embed_dim}, num_averages={self.num_averages}"

    def kernel(self, length: int) -> Tensor:
        """Return the kernels of both directions up to a length, ``[2, C, length]``."""
        wide = statistics_dtype(self.weight.dtype)
        alpha, delta = self.alpha.to(wide).sigmoid(), self.delta.to(wide).sigmoid()
        steps = torch.arange(length, device=alpha.device, dtype=wide)
        kept = torch.exp(torch.log1p(-alpha * delta).unsqueeze(-1) * steps)
        return torch.einsum("rcs,rcsn->rcn", self.weight.to(wide) * alpha, kept)

    def _run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if x.shape[1] == 0:
            return x
        # Fourier transforms have no half precision; autocast would bring it back through the products of the kernel.
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            u = x.to(statistics_dtype(x.dtype)).transpose(1, 2)
            return long_convolution(u, self.kernel(x.shape[1]).to(u.dtype)).transpose(1, 2).to(x.dtype)
