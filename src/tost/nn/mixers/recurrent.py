"""Causal mixers with a state of constant size besides `CausalTSSAttention`, for language models and probes.

Each is its recurrence, computed for all tokens of a piece at once. Padding leaves the state as it is.

Shapes: x [B, N, C] (batch, tokens, width), heads [B, N, H, D] with C = H * D, memory as each class says, mask [B, N].
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost import parallel
from tost.nn._checks import check_memory
from tost.nn.mixers.base import Accepts, CausalMixer
from tost.nn.state import Carry, Continues, RecurrentState
from tost.ops._checks import check_mask
from tost.ops._numerics import num_tokens, zero_padding
from tost.ops._scan import linear_recurrence, prefix_sums
from tost.parallel.recurrence import recurrence_ends

_CHUNK = 64  # tokens that meet by matrix products; longer sequences are walked in chunks


class NoMixer(nn.Module, Continues[RecurrentState]):
    """No mixing: the control for the rest of a model without attention.

    Args:
        embed_dim: Width of the tokens, C.
        num_heads: Not used.

    Example:
        >>> import torch, tost
        >>> tost.nn.NoMixer(64, 4)(torch.randn(2, 10, 64)).any()
        tensor(False)
    """

    accepts = Accepts(state=RecurrentState)

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim

    def forward(self, x: Tensor, mask: Tensor | None = None, *, carry: Carry | None = None) -> Tensor:
        """Return zeros of the shape of x [B, N, C]; the state in `carry` only counts the tokens."""
        check_mask(mask, x)
        if carry is not None:
            before = RecurrentState.empty(x, 0) if carry.state is None else carry.state
            carry.state = RecurrentState(before.memory, before.position + num_tokens(x, mask))
        # A product, so that the norm in front gets a gradient (of zero), which data parallelism waits for.
        return zero_padding(x, mask) * 0


class _RecurrentMixer(CausalMixer[RecurrentState]):
    """A projected mixer with a memory; subclasses supply its size and its recurrence."""

    accepts = Accepts(state=RecurrentState)

    def _advance(
        self, x: Tensor, parts: Tensor, state: RecurrentState | None, mask: Tensor | None
    ) -> tuple[Tensor, RecurrentState]:
        before = RecurrentState.empty(x, *self.memory_shape()) if state is None else state
        check_memory(before.memory, x.shape[0], self.memory_shape())
        y, memory, seen = parts[:, :, 0], before.memory, num_tokens(x, mask)
        if (context := parallel.active()) is not None:
            seen = context.sum(seen)
        if x.shape[1] > 0 or context is not None:
            # The recurrences multiply many small numbers: they run in float32 or better, also under autocast.
            with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
                y, memory = self.recur(x, parts, before.memory, mask)
        return y.to(parts.dtype), RecurrentState(memory, before.position + seen)

    @abstractmethod
    def memory_shape(self) -> tuple[int, ...]:
        """Return the shape of the memory of one sequence."""

    @abstractmethod
    def recur(self, x: Tensor, parts: Tensor, memory: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, N, H, D] and the memory after the tokens.

        Args:
            x: Tokens, ``[B, N, C]``; what padding holds is unknown.
            parts: Their projections, ``[B, N, P, H, D]``, zero for padding.
            memory: Before the first token, in the statistics' dtype.
            mask: Real tokens, bool ``[B, N]``.
        """


class CausalLinearAttention(_RecurrentMixer):
    """Causal attention of the Linear Transformer (Katharopoulos et al., 2020).

    .. code-block:: text

        phi(x) = elu(x) + 1
        S[n,h] = S[n-1,h] + phi(k[n,h]) (v[n,h], 1)^T          memory [H, D, D + 1]
        (a, b) = phi(q[n,h])^T S[n,h],   y[n,h] = a / (b + eps)

    Arguments are those of `ProjectedMixer`, of which `attn_drop` has no effect.

    Example:
        >>> import torch, tost
        >>> mixer = tost.nn.CausalLinearAttention(64, 4)
        >>> _, state = mixer.forward_with_state(torch.randn(1, 100, 64))
        >>> state.memory.shape
        torch.Size([1, 4, 16, 17])
    """

    eps: ClassVar[float] = 1e-6

    def memory_shape(self) -> tuple[int, ...]:
        """Return the shape of the memory of one sequence."""
        return self.num_heads, self.head_dim, self.head_dim + 1

    def recur(self, x: Tensor, parts: Tensor, memory: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the memory after the tokens; see the base class."""
        query, key, value = (part.transpose(1, 2) for part in parts.to(memory.dtype).unbind(2))
        query, key = F.elu(query) + 1, zero_padding((F.elu(key) + 1).transpose(1, 2), mask).transpose(1, 2)
        value = F.pad(value, (0, 1), value=1.0)
        outputs = []
        for q, k, v in zip(*(torch.split(part, _CHUNK, dim=2) for part in (query, key, value)), strict=True):
            outputs.append(q @ memory + (q @ k.mT).tril() @ v)
            memory = memory + k.mT @ v
        y = torch.cat(outputs, dim=2).transpose(1, 2)
        return y[..., :-1] / (y[..., -1:] + self.eps), memory


class MinGRU(_RecurrentMixer):
    """A gated mean per channel: minGRU (Feng et al., 2024) with a gate on its output.

    .. code-block:: text

        z = sigmoid(W_z x),   h[n] = (1 - z[n]) h[n-1] + z[n] W_h x[n]          memory [C]
        y[n] = silu(W_g x[n]) h[n]

    Arguments are those of `ProjectedMixer`, of which `attn_drop` has no effect.

    Example:
        >>> import torch, tost
        >>> _, state = tost.nn.MinGRU(64, 4).forward_with_state(torch.randn(1, 100, 64))
        >>> state.memory.shape
        torch.Size([1, 64])
    """

    accepts = Accepts(state=RecurrentState, shared=True)

    def memory_shape(self) -> tuple[int, ...]:
        """Return the shape of the memory of one sequence."""
        return (self.embed_dim,)

    def recur(self, x: Tensor, parts: Tensor, memory: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the memory after the tokens; see the base class."""
        update, value, gate = parts.to(memory.dtype).flatten(3).unbind(2)
        update = zero_padding(update.sigmoid(), mask)
        hidden, last = shared_recurrence(1 - update, update * value, memory)
        return (F.silu(gate) * hidden).reshape(parts[:, :, 0].shape), last


class GatedDeltaNet(_RecurrentMixer):
    """Gated delta rule (Yang et al., 2024): a memory of key-value pairs that forgets and overwrites.

    .. code-block:: text

        S[n,h] = a[n,h] S[n-1,h] (I - b[n,h] k k^T) + b[n,h] v k^T          memory [H, D, D]
        y[n,h] = RMSNorm(S[n,h] q) silu(gate[n,h])
        a = exp(-rate softplus(W_a x + offset)),   b = sigmoid(W_b x)

    Queries and keys are those of the projection after a SiLU, scaled to length 1.

    The short convolutions of the original are those of the block. Within a chunk of tokens the written values
    solve a triangular system, so that a chunk is a few matrix products.

    Arguments are those of `ProjectedMixer`, of which `attn_drop` has no effect.

    Example:
        >>> import torch, tost
        >>> _, state = tost.nn.GatedDeltaNet(64, 4).forward_with_state(torch.randn(1, 100, 64))
        >>> state.memory.shape
        torch.Size([1, 4, 16, 16])
    """

    parts: ClassVar[int] = 4

    def _add_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.proj_rates = nn.Linear(self.embed_dim, 2 * self.num_heads, bias=False, device=device, dtype=dtype)
        # Heads start with half-lives from a few tokens to about a thousand.
        steps = torch.logspace(-3, -1, self.num_heads, dtype=torch.float64)
        self.log_rate = nn.Parameter(torch.linspace(0, math.log(16), self.num_heads, device=device, dtype=dtype))
        self.offset = nn.Parameter(steps.expm1().log().to(device=device, dtype=dtype))
        self.norm_weight = nn.Parameter(torch.ones(self.head_dim, device=device, dtype=dtype))

    def memory_shape(self) -> tuple[int, ...]:
        """Return the shape of the memory of one sequence."""
        return self.num_heads, self.head_dim, self.head_dim

    def recur(self, x: Tensor, parts: Tensor, memory: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the memory after the tokens; see the base class."""
        wide = memory.dtype
        query, key, value, gate = (part.transpose(1, 2) for part in parts.to(wide).unbind(2))
        query, key = (F.normalize(F.silu(part), dim=-1) for part in (query, key))
        rates = F.linear(zero_padding(x, mask).to(wide), self.proj_rates.weight.to(wide))
        fade, write = rates.chunk(2, dim=2)
        log_fade = -self.log_rate.to(wide).exp() * F.softplus(fade + self.offset.to(wide))
        log_fade, write = (zero_padding(part, mask).transpose(1, 2) for part in (log_fade, write.sigmoid()))
        y, memory = delta_rule(query, key, value, log_fade, write, memory)
        y = F.rms_norm(y, (self.head_dim,), self.norm_weight.to(wide), eps=1e-6) * F.silu(gate)
        return y.transpose(1, 2), memory


def shared_recurrence(factor: Tensor, value: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return h as `linear_recurrence` does, and h after the last token.

    Where processes share the sequence, the tokens are those of this rank, `start` is h before the whole sequence, and
    the second result is h after it.

    Args:
        factor: ``[B, N, C]``, in [0, 1].
        value: ``[B, N, C]``.
        start: ``[B, C]``.

    Returns:
        ``[B, N, C]`` and ``[B, C]``.
    """
    if (context := parallel.active()) is None:
        h = linear_recurrence(factor, value, start)
        return h, h[:, -1]
    if value.shape[1] > 0:
        kept = linear_recurrence(factor, torch.zeros_like(value), torch.ones_like(start))
        own = linear_recurrence(factor, value, torch.zeros_like(start))
        product, end = kept[:, -1], own[:, -1]
    else:
        # Sums over no tokens, which keep this rank in the exchanges of the backward pass.
        kept, own = factor, value
        product, end = 1 + kept.sum(dim=1), own.sum(dim=1)
    before, after = recurrence_ends(product, end, start, channel=context.channel)
    return torch.addcmul(own, kept, before.unsqueeze(1)), after


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_fade: Tensor, write: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule; see `GatedDeltaNet`.

    With ``u[n] = b (v - a S[n-1] k)``, what is really written, ``S[n] = a S[n-1] + u k^T``. Let c[n] be the product of
    the a up to n within a chunk. Then ``(I + L) U = diag(b) (V - diag(c) K S^T)`` with the strictly lower triangular
    ``L[n,m] = b[n] c[n]/c[m] k[n].k[m]``, for the memory S before the chunk.

    Args:
        query: ``[B, H, N, D]``.
        key: ``[B, H, N, D]``, of length 1.
        value: ``[B, H, N, D]``.
        log_fade: Logarithm of a, ``[B, H, N]``.
        write: b, ``[B, H, N]``.
        memory: S before the first token, ``[B, H, D, D]``, rows for values and columns for keys.

    Returns:
        ``S[n] q[n]``, ``[B, H, N, D]``, and the memory after the last token.
    """
    outputs = []
    pieces = (torch.split(part, _CHUNK, dim=2) for part in (query, key, value, log_fade, write))
    for q, k, v, log_a, b in zip(*pieces, strict=True):
        log_c = prefix_sums(log_a.mT.unsqueeze(-1)).squeeze(-1).mT
        faded = (log_c.unsqueeze(-1) - log_c.unsqueeze(-2)).tril().exp()
        c = log_c.exp().unsqueeze(-1)
        system = (b.unsqueeze(-1) * faded * (k @ k.mT)).tril(-1)
        wanted = b.unsqueeze(-1) * (v - c * (k @ memory.mT))
        written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(c * (q @ memory.mT) + ((q @ k.mT) * faded).tril() @ written)
        memory = c[:, :, -1:] * memory + (written * faded[:, :, -1].unsqueeze(-1)).mT @ k
    return torch.cat(outputs, dim=2), memory
