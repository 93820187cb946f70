"""A local mixer for tokens that lie on a grid. An option of ours: the authors' backbone has nothing like it.

Shapes: x [B, N, C] (batch, tokens, width), N = rows * columns in row-major order, mask [B, N].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn._mixer import check_width, refuse_context
from tost.ops._checks import check_mask
from tost.ops._numerics import zero_padding

__all__ = ["GridMixer"]


class GridMixer(nn.Module):
    """A depth-wise convolution over the neighbours of each token on the grid, zero beyond its edge.

    Statistics over all tokens cannot tell neighbours from strangers; this can. A `Block` adds the result to what its
    attention sees, so the identity is not part of the kernel: it starts small, N(0, 0.02), and without a bias, which
    the norm before and the projection behind already have. The kernel fits every grid, whatever its size and aspect.

    Args:
        embed_dim: Width of the tokens, C.
        width: Side of the kernel in tokens; odd, so that it has a centre.
        device: Where the parameters live.
        dtype: Type of the parameters.

    Raises:
        ValueError: `width` is not odd.

    Example:
        >>> import torch, tost
        >>> tost.nn.GridMixer(64)(torch.randn(2, 15, 64), (3, 5)).shape
        torch.Size([2, 15, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        width: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if width < 1 or width % 2 == 0:
            raise ValueError(f"width={width} has no centre; use an odd number of at least 1, such as 3.")
        self.embed_dim, self.width = embed_dim, width
        self.weight = nn.Parameter(torch.empty(embed_dim, 1, width, width, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"embed_dim={self.embed_dim}, width={self.width}"

    def forward(self, x: Tensor, grid: tuple[int, int] | None, mask: Tensor | None = None) -> Tensor:
        """Mix each of the tokens x [B, N, C] with those around it.

        Args:
            x: Tokens, ``[B, N, C]``, row by row.
            grid: Rows and columns; their product is N.
            mask: Real tokens, bool ``[B, N]``; the others count as beyond the edge.

        Returns:
            ``[B, N, C]``.

        Raises:
            ValueError: `x` or `mask` has the wrong shape, or `grid` is missing or does not hold N tokens.
            BackendError: Context parallelism is active; a piece of a sequence does not hold all neighbours.
        """
        refuse_context("GridMixer")
        check_width(x, self.embed_dim)
        check_mask(mask, x)
        if grid is None or grid[0] * grid[1] != x.shape[1]:
            raise ValueError(
                f"grid={grid} does not hold the {x.shape[1]} tokens of x {tuple(x.shape)}; "
                "give (rows, columns) with rows * columns = N, without class tokens."
            )
        # Tokens in row-major order are an image in channels-last layout: these are views, not copies.
        image = zero_padding(x, mask).reshape(x.shape[0], *grid, self.embed_dim).permute(0, 3, 1, 2)
        mixed = F.conv2d(image, self.weight, padding=self.width // 2, groups=self.embed_dim)
        return mixed.permute(0, 2, 3, 1).flatten(1, 2)
