"""Linformer: softmax attention to a fixed number of learned mixtures of the tokens.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D, mixtures [L, R] with L = max_length and
R = rank, mask [B, N].
"""

from __future__ import annotations

from typing import Literal, Unpack

from torch import Tensor, nn

from tost.nn.mixers.base import ProjectedMixer, Projections, real_first


class Linformer(ProjectedMixer):
    """Attention of Linformer (Wang et al., 2020).

    .. code-block:: text

        k'[r,h] = sum_n E[n,r] k[n,h],   v'[r,h] = sum_n F[n,r] v[n,h]
        y[n,h]  = softmax over r of ( q[n,h] . k'[r,h] / sqrt(D) ) applied to v'[:,h]

    E and F are learned and have a row per position, so the length is limited; shorter sequences take the first rows.
    They start Xavier-uniform. The official Long-Range Arena has ``rank=16`` and ``share="kv"`` in every task. It does
    not mask padding; here padding never counts. Tokens are numbered without padding, so a mask is a deletion.

    Arguments are those of `ProjectedMixer`, plus:

    Args:
        max_length: Longest sequence, L; padding inside a longer one does not help.
        rank: Number of mixtures, R.
        share: What shares a matrix: ``"kv"``, keys, values and all heads, so E = F; ``"heads"``, all heads, with one
            for keys and one for values; ``"none"``, nothing.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or another argument is out of its range.

    Example:
        >>> import torch, tost
        >>> tost.nn.Linformer(64, 4, max_length=100, rank=16)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_length: int,
        rank: int = 256,
        share: Literal["kv", "heads", "none"] = "heads",
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(embed_dim, num_heads, **projections)
        if share not in ("kv", "heads", "none"):
            raise ValueError(f"share={share!r} is not known; it takes 'kv', 'heads' or 'none'.")
        if max_length < 1 or rank < 1:
            raise ValueError(f"max_length={max_length} and rank={rank} must both be at least 1.")
        self.max_length, self.rank, self.share = max_length, rank, share
        shape = (1 if share == "kv" else 2, num_heads if share == "none" else 1, max_length, rank)
        bound = (6 / (max_length + rank)) ** 0.5
        self.mixtures = nn.Parameter(self.proj_in.weight.new_empty(shape).uniform_(-bound, bound))

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{super().extra_repr()}, max_length={self.max_length}, rank={self.rank}, share={self.share!r}"

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        if parts.shape[1] > self.max_length:
            raise ValueError(
                f"the sequence has {parts.shape[1]} tokens, but this module was made for max_length={self.max_length}. "
                f"Use a shorter sequence, or build it with max_length={parts.shape[1]} or more."
            )
        return real_first(self._attend_mixtures, parts, mask)

    def _attend_mixtures(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        # Keys and values of padding are zero, so it has no part in the mixtures.
        tables = self.mixtures[:, :, : parts.shape[1]].mT
        return self._softmax(query, tables[0] @ key, tables[-1] @ value).transpose(1, 2)
