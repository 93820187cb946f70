"""Attention between all pairs of tokens, or of features: softmax, MSSA, XCA, and causal softmax with its growing state.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D, M tokens in a state, mask [B, N].
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn.mixers.base import Accepts, CausalMixer, ProjectedMixer, Projections
from tost.nn.state import KVState
from tost.ops._numerics import num_tokens, statistics_dtype
from tost.ops._transforms import is_transformed


class SoftmaxAttention(ProjectedMixer):
    """Scaled dot-product attention between all pairs of tokens: ``softmax(q k^T / sqrt(D)) v`` in every head.

    Arguments are those of `ProjectedMixer`.

    Example:
        >>> import torch, tost
        >>> tost.nn.SoftmaxAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = parts.unbind(2)
        return self._attend(query, key, value, mask)


class SubspaceAttention(ProjectedMixer):
    """MSSA: softmax attention in which one projection w serves as query, key and value.

    ``y = proj_out(softmax(w w^T / sqrt(D)) w)`` in every head. It is TSSA's predecessor: the same single projection
    into subspaces, but with scores between all pairs of tokens.

    Arguments are those of `ProjectedMixer`, but `in_bias` is off by default, as in CRATE.

    Example:
        >>> import torch, tost
        >>> tost.nn.SubspaceAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    parts: ClassVar[int] = 1

    def __init__(self, embed_dim: int, num_heads: int, **projections: Unpack[Projections]) -> None:
        projections.setdefault("in_bias", False)
        super().__init__(embed_dim, num_heads, **projections)

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        w = parts.squeeze(2)
        return self._attend(w, w, w, mask)


NORM_FLOOR = 1e-12


class CrossCovarianceAttention(ProjectedMixer):
    """XCA: attention between the features of a head, with weights taken from their covariance over the tokens.

    .. code-block:: text

        a[h]   = softmax over e of ( temperature[h] * sum_n q[n,h,d] k[n,h,e] / (|q[:,h,d]| |k[:,h,e]|) )     [D, D]
        y[n,h] = a[h] v[n,h]

    The norms run over the tokens, so the cost is linear in their number, as with TSSA.

    Arguments are those of `ProjectedMixer`.

    Example:
        >>> import torch, tost
        >>> tost.nn.CrossCovarianceAttention(64, 4)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def _add_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.temperature = nn.Parameter(torch.ones(self.num_heads, device=device, dtype=dtype))

    def _mix(self, parts: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (part.permute(0, 2, 3, 1) for part in parts.unbind(2))  # [B, H, D, N]
        scores = _unit(query) @ _unit(key).transpose(-2, -1)
        weights = (scores * self.temperature[:, None, None]).softmax(dim=-1)
        weights = F.dropout(weights, self.attn_drop, self.training)
        return (weights.to(value.dtype) @ value).permute(0, 3, 1, 2)


def _unit(x: Tensor) -> Tensor:
    """Scale every feature of x [B, H, D, N] to norm 1 over the tokens; the floor would round to 0 in half precision."""
    return F.normalize(x.to(statistics_dtype(x.dtype)), dim=-1, eps=NORM_FLOOR).to(x.dtype)


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

    accepts = Accepts(state=KVState)

    def _advance(self, x: Tensor, parts: Tensor, state: KVState | None, mask: Tensor | None) -> tuple[Tensor, KVState]:
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        after = self._extend(state, key, value, mask)
        rule, causal = _visible(after, x.shape[1])
        return self._softmax(query, after.keys, after.values, rule, causal=causal).transpose(1, 2), after

    def _extend(self, state: KVState | None, key: Tensor, value: Tensor, mask: Tensor | None) -> KVState:
        """Return the state after tokens with these keys and values, [B, H, N, D]."""
        tokens = num_tokens(key.transpose(1, 2), mask)
        if state is None:
            return KVState(
                key, value, key.new_zeros(key.shape[0], 0, dtype=torch.bool) if mask is None else mask, tokens
            )
        B, H, M, D = state.keys.shape
        if (key.shape[0], self.num_heads, self.head_dim) != (B, H, D):
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


_NAME = "_tost_room"


class _Room:
    """A buffer [B, H, capacity, D], and how much of it has been given out."""

    def __init__(self, buffer: Tensor, used: int) -> None:
        self.buffer, self.used = buffer, used


def append_tokens(before: Tensor, new: Tensor) -> Tensor:
    """Return ``torch.cat((before, new), dim=2)``.

    Args:
        before: ``[B, H, M, D]``; not changed.
        new: ``[B, H, N, D]``.

    Returns:
        ``[B, H, M + N, D]`` in the dtype of `new`.
    """
    recorded = torch.is_grad_enabled() and (before.requires_grad or new.requires_grad)
    if recorded or torch.compiler.is_compiling() or is_transformed():
        return torch.cat((before.to(new.dtype), new), dim=2)
    M, total = before.shape[2], before.shape[2] + new.shape[2]
    room: _Room | None = getattr(before, _NAME, None)
    if room is None or not _has_room(room, M, total, new):
        B, H, _, D = before.shape
        room = _Room(new.new_empty(B, H, 2 * total, D), M)
        room.buffer[:, :, :M] = before
    room.buffer[:, :, M:total] = new
    room.used = total
    longer = room.buffer[:, :, :total]
    setattr(longer, _NAME, room)  # found again through the state that holds this very tensor
    return longer


def _has_room(room: _Room, length: int, total: int, new: Tensor) -> bool:
    """Return whether the space after the first `length` tokens is free; another text may continue there."""
    fits = room.used == length and total <= room.buffer.shape[2]
    # A tensor made in inference mode may not be written outside of it.
    return fits and room.buffer.dtype == new.dtype and room.buffer.is_inference() == torch.is_inference_mode_enabled()
