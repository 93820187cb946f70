"""Causal softmax attention over the last tokens only: linear time, and a state of constant size.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, H, N, D] with C = H * D, W tokens in a window, mask [B, N].
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from tost.nn.mixers.projected import CausalMixer, Projections
from tost.nn.state import WindowState
from tost.ops._numerics import num_tokens


class WindowAttention(CausalMixer[WindowState]):
    """Scaled dot-product attention between each token and the last `window` real tokens, itself among them.

    Queries are taken in chunks that meet the keys of their own windows only, so time is linear in the tokens. Padding
    takes no place in a window.

    Arguments are those of `ProjectedMixer`, plus:

    Args:
        window: Number of tokens that a token sees, itself included, W.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or `window` is not positive.

    Example:
        >>> import torch, tost
        >>> attention = tost.nn.WindowAttention(64, 4, window=32)
        >>> _, state = attention.forward_with_state(torch.randn(1, 100, 64))
        >>> state.keys.shape
        torch.Size([1, 4, 31, 16])
    """

    state_kind: ClassVar[type] = WindowState

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        window: int = 128,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(embed_dim, num_heads, **projections)
        if window < 1:
            raise ValueError(f"window={window} is not possible; a token sees itself at least, so use 1 or more.")
        self.window = window

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{super().extra_repr()}, window={self.window}"

    def _advance(
        self, x: Tensor, parts: Tensor, state: WindowState | None, mask: Tensor | None
    ) -> tuple[Tensor, WindowState]:
        order = None if mask is None else mask.argsort(dim=1, descending=True, stable=True)
        if order is not None:  # real tokens first: windows then are neighbours
            parts = parts.take_along_dim(order[:, :, None, None, None], dim=1)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        before = self._before(state, key)
        keys, values = (torch.cat((a.to(b.dtype), b), dim=2) for a, b in ((before.keys, key), (before.values, value)))
        y = self._look_back(query, keys, values, before.position).transpose(1, 2)
        if order is not None:
            y = y.take_along_dim(order.argsort(dim=1)[:, :, None, None], dim=1)
        return y, self._after(keys, values, before.position, num_tokens(x, mask))

    def _before(self, state: WindowState | None, key: Tensor) -> WindowState:
        B, wanted = len(key), (len(key), self.num_heads, self.window - 1, self.head_dim)
        if state is None:
            empty = key.new_zeros(wanted)
            return WindowState(empty, empty, torch.zeros(B, dtype=torch.int64, device=key.device))
        if state.keys.shape != wanted:
            raise ValueError(
                f"the state has keys of shape {tuple(state.keys.shape)}, but {B} sequences and this attention need "
                f"{wanted}. Pass the state that came from the same batch and model, or None at the start."
            )
        return state

    def _look_back(self, query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """Return what the queries [B, H, N, D] see in keys and values [B, H, W - 1 + N, D]: query n those from n on."""
        N, past = query.shape[2], self.window - 1
        if N == 0:
            return query
        size = min(N, self.window)
        chunks = -(-N // size)
        spare = chunks * size - N
        query = F.pad(query, (0, 0, 0, spare)).reshape(*query.shape[:2], chunks, size, self.head_dim)
        keys, values = (
            F.pad(part, (0, 0, 0, spare)).unfold(2, past + size, size).transpose(-1, -2) for part in (keys, values)
        )
        place = torch.arange(past + N + spare, device=query.device)
        known = (place >= past - position.clamp_max(past).unsqueeze(1)).unfold(1, past + size, size)
        distance = place[: past + size] - place[:size].unsqueeze(1)
        rule = (distance >= 0) & (distance <= past) & known[:, None, :, None]
        return self._softmax(query, keys, values, rule).flatten(2, 3)[:, :, :N]

    def _after(self, keys: Tensor, values: Tensor, position: Tensor, tokens: Tensor) -> WindowState:
        """Return the state with the last W - 1 real tokens of each sequence, of which `tokens` [B] are new."""
        last = tokens.unsqueeze(1) + torch.arange(self.window - 1, device=tokens.device)
        keys, values = (part.take_along_dim(last[:, None, :, None], dim=2) for part in (keys, values))
        return WindowState(keys, values, position + tokens)
