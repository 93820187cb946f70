"""Causal softmax attention, the baseline of the language models: it streams too, from a state that grows.

Shapes: x [B, N, C] (batch, tokens, width), queries [B, H, N, D], keys and values [B, H, M + N, D] with C = H * D and M
tokens in the state, mask [B, N].
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tost.nn.mixers._growing import append_tokens
from tost.nn.mixers.projected import CausalMixer
from tost.nn.state import KVState
from tost.ops._numerics import num_tokens


class CausalSoftmaxAttention(CausalMixer[KVState]):
    """Scaled dot-product attention between each token and those up to it, as in GPT-2.

    Arguments are those of `ProjectedMixer`.

    Example:
        >>> import torch, tost
        >>> attention = tost.nn.CausalSoftmaxAttention(64, 4)
        >>> first, state = attention.forward_with_state(torch.randn(1, 100, 64))
        >>> second, state = attention.forward_with_state(torch.randn(1, 1, 64), state)
        >>> second.shape, state.keys.shape
        (torch.Size([1, 1, 64]), torch.Size([1, 4, 101, 16]))
    """

    state_kind: ClassVar[type] = KVState

    def _advance(self, x: Tensor, parts: Tensor, state: KVState | None, mask: Tensor | None) -> tuple[Tensor, KVState]:
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        after = self._extend(state, key, value, mask)
        rule, causal = _visible(after, x.shape[1])
        return self._softmax(query, after.keys, after.values, rule, causal=causal).transpose(1, 2), after

    def _extend(self, state: KVState | None, key: Tensor, value: Tensor, mask: Tensor | None) -> KVState:
        """Return the state after tokens with these keys and values, [B, H, N, D]."""
        tokens = num_tokens(key.transpose(1, 2), mask)
        if state is None:
            return KVState(key, value, key.new_zeros(len(key), 0, dtype=torch.bool) if mask is None else mask, tokens)
        B, H, M, D = state.keys.shape
        if (len(key), self.num_heads, self.head_dim) != (B, H, D):
            raise ValueError(
                f"the state has keys of shape {tuple(state.keys.shape)}, but {len(key)} sequences and this attention "
                f"need [{len(key)}, {self.num_heads}, M, {self.head_dim}]. Pass the state that came from the same "
                "batch and model, or None at the start."
            )
        real = state.real
        if mask is not None or real.shape[1] > 0:
            earlier = real if real.shape[1] == M else real.new_ones(B, M)
            real = torch.cat((earlier, real.new_ones(B, key.shape[2]) if mask is None else mask), dim=1)
        keys, values = append_tokens(state.keys, key), append_tokens(state.values, value)
        return KVState(keys, values, real, state.position + tokens)


def _visible(state: KVState, num_queries: int) -> tuple[Tensor | None, bool]:
    """Return the mask of visible keys for the last tokens, [B or 1, 1, N, M + N] or None, and torch's `is_causal`."""
    total = state.keys.shape[2]
    if state.real.shape[1] == 0 and (num_queries == total or num_queries == 1):
        return None, num_queries > 1
    key = torch.arange(total, device=state.keys.device)
    query = key[total - num_queries :].unsqueeze(1)
    rule = (key <= query).expand(1, 1, -1, -1)
    if state.real.shape[1] > 0:
        # Padding sees itself, or its softmax would be over nothing and not a number.
        rule = rule & (state.real[:, None, None] | (key == query))
    return rule, False
