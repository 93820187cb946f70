"""TSSA as an attention module: a projection into heads, the operator, a projection back.

Shapes: x [B, N, C] (batch, tokens, width), w [B, N, H, D] with C = H * D unless D is chosen, mask [B, N].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost import parallel
from tost.nn._checks import Factory, check_blocks, check_heads, check_width, is_plain_linear
from tost.nn.masks import read_attention_mask
from tost.nn.mixers.base import Accepts, accepted, mix
from tost.nn.position import token_positions
from tost.nn.state import Carry, ContinuesPacked
from tost.ops import GatedState, Packing, TSSAState, causal_tssa_with_state, gated_tssa_with_state, tssa
from tost.ops._numerics import statistics_dtype, zero_padding
from tost.ops.packing import count_tokens

NORM_EPS = 1e-6
"""Added to the mean square of a head before its root is taken."""


@dataclass(frozen=True)
class PaperForm:
    """The attention of the paper's equations, where it differs from the authors' code.

    The code frees what the equations tie: a second weight matrix in place of ``U``, and with it the step size; one
    temperature per head; no coding precision. With ``eps = sqrt(C)`` (so ``C / eps^2 = 1``) and orthonormal heads the
    module's output is minus `step_size` times the gradient of the variational compression objective.

    Attributes:
        step_size: tau. The output is multiplied by ``tau / n`` (``tau / j`` at position j of a causal sequence), n
            counting the real tokens. None leaves it out.
        eps: Coding precision; the operator becomes ``D = c / (1 + c * moment)``, ``c = C / eps^2``. None means c = 1.
        tied: Project back with the transpose of the first projection's weight.
        shared_temperature: One temperature ``1 / (2 eta)`` for all heads.
    """

    step_size: float | None = 1.0
    eps: float | None = None
    tied: bool = True
    shared_temperature: bool = True

    @classmethod
    def free(cls) -> PaperForm:
        """Return the form of the authors' code."""
        return cls(step_size=None, tied=False, shared_temperature=False)


def real_tokens(x: Tensor, mask: Tensor | None, attn_mask: Tensor | None, *, causal: bool) -> Tensor | None:
    """Return which tokens x [B, N, C] are real by either mask, bool [B, N]; None if all are."""
    if attn_mask is None:
        return mask
    read = read_attention_mask(attn_mask, x.shape[0], x.shape[1], causal=causal)
    return mask if read is None else read if mask is None else read & mask


class _ProjectedAttention(nn.Module):
    """Projections, temperature and the scales of the paper's form, for both orders."""

    causal: ClassVar[bool] = False
    accepts = Accepts(packing=True, shared=True)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        in_bias: bool,
        out_bias: bool,
        out_drop: float,
        paper: PaperForm | None,
        head_dim: int | None,
        backend: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            check_heads(embed_dim, num_heads)
            head_dim = embed_dim // num_heads
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        inner = num_heads * head_dim
        self.paper = PaperForm.free() if paper is None else paper
        self.backend = backend
        self.proj_in = nn.Linear(embed_dim, inner, bias=in_bias, device=device, dtype=dtype)
        temperatures = 1 if self.paper.shared_temperature else num_heads
        self.temperature = nn.Parameter(torch.ones(temperatures, device=device, dtype=dtype))
        if self.paper.tied:
            self.proj_out = None
            self.out_bias = nn.Parameter(torch.zeros(embed_dim, device=device, dtype=dtype)) if out_bias else None
        else:
            self.proj_out = nn.Linear(inner, embed_dim, bias=out_bias, device=device, dtype=dtype)
        self.out_drop = out_drop

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, backend={self.backend!r}"

    def _tokens(self, x: Tensor) -> Tensor:
        check_width(x, self.embed_dim)
        w: Tensor = self.proj_in(x).reshape(*x.shape[:2], self.num_heads, self.head_dim)
        return w if self.paper.eps is None else w * self._scale()

    def _scale(self) -> float:
        """sqrt(c): scaling the tokens by it before the operator and again after it puts c into D."""
        return 1.0 if self.paper.eps is None else math.sqrt(self.embed_dim) / self.paper.eps

    def _temperatures(self) -> Tensor:
        return self.temperature.expand(self.num_heads) if self.paper.shared_temperature else self.temperature

    def _owns_tokens(self) -> bool:
        """Return whether the operator may overwrite its tokens: no hook can hold the output of the projection."""
        return is_plain_linear(self.proj_in)

    def _project_out(self, y: Tensor, count: Tensor | int | None) -> Tensor:
        """Apply step size, output projection and dropout; count is the number of tokens in a statistic."""
        flat = y.flatten(2)
        if self.paper.step_size is not None or self.paper.eps is not None:
            scale: Tensor | float = self._scale()
            if self.paper.step_size is not None and count is not None:
                if isinstance(count, Tensor):  # half precision cannot count past 2048
                    count = count.to(torch.promote_types(y.dtype, torch.float32))
                scale = scale * self.paper.step_size / count
            flat = (flat * scale).to(flat.dtype)
        if self.proj_out is not None:
            flat = self.proj_out(flat)
        else:
            flat = F.linear(flat, self.proj_in.weight.t(), self.out_bias)
        return F.dropout(flat, self.out_drop) if self.training and self.out_drop > 0 else flat


class TSSAttention(_ProjectedAttention):
    """Token Statistics Self-Attention: a drop-in for a non-causal attention module, in linear time.

    ``y = proj_out(tssa(proj_in(x)))``; see `tost.tssa` for the operator. The defaults are the authors' vision code.

    Args:
        embed_dim: Width of the tokens, C.
        num_heads: Number of heads (groups), H; divides C.
        in_bias: Bias of the first projection.
        out_bias: Bias of the second projection.
        gain_drop: Dropout on ``D = 1 / (1 + moment)``, one decision per sequence, head and feature.
        out_drop: Dropout on the output.
        normalize: Normalize each feature over the tokens before memberships are taken; False is the ablation.
        paper: Use the paper's equations where they differ from the code; see `PaperForm`.
        head_dim: Width of a head, D; by default C / H.
        value_conv: Adds the neighbors of each projected token to the operator's output, ``tssa(w) + value_conv(w)``,
            such as `GridConvolution` of width H * D (not in the paper).
        backend: Implementation of the operator, see `tost.tssa`.
        device: Where the parameters live.
        dtype: Type of the parameters.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`.

    Example:
        >>> import torch, tost
        >>> attention = tost.TSSAttention(embed_dim=384, num_heads=8)
        >>> attention(torch.randn(2, 196, 384)).shape
        torch.Size([2, 196, 384])
    """

    block_size: int = 1

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        in_bias: bool = True,
        out_bias: bool = True,
        gain_drop: float = 0.0,
        out_drop: float = 0.0,
        normalize: bool = True,
        paper: PaperForm | None = None,
        head_dim: int | None = None,
        value_conv: nn.Module | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        projected = (embed_dim, num_heads, in_bias, out_bias, out_drop, paper, head_dim)
        super().__init__(*projected, backend, device, dtype)
        self.value_conv = value_conv
        self.accepts = self.accepts._replace(grid=accepted(value_conv).grid)
        self.gain_drop, self.normalize = gain_drop, normalize

    def operator_options(self) -> dict[str, Any]:
        """Return the options of this layer's operator, as keyword arguments of `tost.tssa` and `tost.membership`."""
        return {"normalize": self.normalize, "block_size": self.block_size}

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        packing: Packing | None = None,
        grid: tuple[int, int] | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Mix the tokens x [B, N, C].

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``. Masked tokens are ignored; their output is the bias.
            packing: Where the sequences begin, if several are packed into a row. Each is taken alone.
            grid: Rows and columns of the tokens; needed by a `value_conv` over a grid.
            attn_mask: The same as timm and torch pass it: bool or added to scores, for tokens ``[B, N]`` or for pairs
                of them ``[B, heads, N, N]`` with any of these axes 1; see `tost.nn.masks`.
            is_causal: For callers of other attention modules; has to be False.

        Returns:
            ``[B, N, C]``.

        Raises:
            ValueError: `attn_mask` says more than which tokens are real, or `is_causal` is true.
            BackendError: Sequences are packed, and processes share them, but `packing` is that of one process.
        """
        if is_causal:
            raise ValueError("is_causal=True, but TSSAttention mixes all tokens; use CausalTSSAttention.")
        w = self._tokens(x)
        mask = real_tokens(x, mask, attn_mask, causal=self.causal)
        near = None if self.value_conv is None else mix(self.value_conv, w.flatten(2), mask, packing, grid)
        options = {"mask": mask, "cu_seqlens": packing, "backend": self.backend, **self.operator_options()}
        y = tssa(w, self._temperatures(), **options, overwrite=self._owns_tokens())
        y = self._shape(self._drop_gains(y, packing), x, mask, near)
        return self._project_out(y, None if self.paper.step_size is None else self._count(x, mask, packing))

    def _shape(self, y: Tensor, x: Tensor, mask: Tensor | None, near: Tensor | None) -> Tensor:
        """Return the operator's output y [B, N, H, D] as the output projection takes it; x are the layer's tokens."""
        return y if near is None else y + near.reshape(y.shape)

    def _temperatures(self) -> Tensor:
        temperature = super()._temperatures()
        return temperature if self.normalize else temperature / self._scale() ** 2

    def _drop_gains(self, y: Tensor, packing: Packing | None) -> Tensor:
        """Drop entries of D: y is proportional to it, so whole features of a head go."""
        if not self.training or self.gain_drop == 0:
            return y
        sequences = y.shape[0] if packing is None else packing.num_sequences
        kept = F.dropout(y.new_ones(sequences, *y.shape[2:]), self.gain_drop)
        if (context := parallel.active()) is not None:
            kept = context.share(kept)
        return y * (kept.unsqueeze(1) if packing is None else packing.of_tokens(kept))

    @staticmethod
    def _count(x: Tensor, mask: Tensor | None, packing: Packing | None) -> Tensor | int:
        """Return the number of real tokens of each token's sequence, [B or 1, 1 or N, 1]."""
        context = parallel.active()
        if mask is None and packing is None and context is None:
            return x.shape[1]
        total = count_tokens(x.shape[1], mask, packing, x.device)
        total = (total if context is None else context.sum(total)).clamp_min(1)
        return (total.unsqueeze(1) if packing is None else packing.of_tokens(total)).unsqueeze(-1)


class BlockTSSAttention(TSSAttention):
    """TSSA in blocks of features, which tells tokens with other combinations of features apart (not in the paper).

    .. code-block:: text

        y = proj_out( silu(proj_gate(x)) * norm( tssa(proj_in(x), block_size=g) ) )

    `norm` divides each head by its root mean square. Projected tokens start with variance 1, so that second moments
    matter from the first step on. Arguments are those of `TSSAttention`, without `paper` and `head_dim`, and:

    Args:
        block_size: Features in a block, g; divides C / H.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or `block_size` not a head.

    Example:
        >>> import torch, tost
        >>> attention = tost.BlockTSSAttention(embed_dim=384, num_heads=8, block_size=8)
        >>> attention(torch.randn(2, 196, 384)).shape
        torch.Size([2, 196, 384])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        block_size: int = 8,
        in_bias: bool = True,
        out_bias: bool = True,
        gain_drop: float = 0.0,
        out_drop: float = 0.0,
        normalize: bool = True,
        value_conv: nn.Module | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            in_bias=in_bias,
            out_bias=out_bias,
            gain_drop=gain_drop,
            out_drop=out_drop,
            normalize=normalize,
            value_conv=value_conv,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        check_blocks(self.head_dim, block_size)
        self.block_size = block_size
        self.proj_gate = nn.Linear(embed_dim, embed_dim, bias=in_bias, device=device, dtype=dtype)
        self.norm_weight = nn.Parameter(torch.ones(embed_dim, device=device, dtype=dtype))
        self.reset_scale()

    @torch.no_grad()
    def reset_scale(self) -> None:
        """Initialize projected tokens of normed inputs with variance 1.

        Models that initialize their weights call it afterwards.
        """
        nn.init.normal_(self.proj_in.weight, std=self.embed_dim**-0.5)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{super().extra_repr()}, block_size={self.block_size}"

    def _shape(self, y: Tensor, x: Tensor, mask: Tensor | None, near: Tensor | None) -> Tensor:
        y = normed_heads(y, self.norm_weight)
        y = y if near is None else y + near.reshape(y.shape)
        return y * gate_of(self.proj_gate(x), mask).reshape(y.shape).to(y.dtype)


def normed_heads(y: Tensor, weight: Tensor) -> Tensor:
    """Divide each head of y [B, N, H, D] by its root mean square; weight is [H * D]."""
    return F.rms_norm(y, y.shape[-1:], eps=NORM_EPS) * weight.to(y.dtype).reshape(y.shape[-2:])


def gate_of(projected: Tensor, mask: Tensor | None) -> Tensor:
    """Return the gate of projected tokens [B, N, C]; 0 for padding, whose product with anything may not be 0."""
    return zero_padding(F.silu(projected), mask)


class CausalTSSAttention(_ProjectedAttention, ContinuesPacked[TSSAState]):
    """Causal TSSA: a drop-in for a causal attention module that streams from a constant-size state.

    ``y = proj_out(causal_tssa(proj_in(x)))``; see `tost.causal_tssa` for the operator. The defaults are the authors'
    language code.

    Args:
        embed_dim: Width of the tokens, C.
        num_heads: Number of heads (groups), H; divides C.
        max_length: Longest sequence that the position bias covers. Without a position bias there is no limit.
        in_bias: Bias of the first projection.
        out_bias: Bias of the second projection.
        position_bias: ``"feature"`` adds the learned bias to each of the D features of a head, as the authors' code
            and listing do (its effect is ``D * b``); ``"head"`` adds it once, as the paper's equation does; None has
            no such bias.
        gain_drop: Dropout on ``D = 1 / (1 + moment)``, one decision per token, head and feature.
        out_drop: Dropout on the output.
        paper: Use the paper's equations where they differ from the code; see `PaperForm`.
        head_dim: Width of a head, D; by default C / H.
        backend: Implementation of the operator, see `tost.causal_tssa`.
        device: Where the parameters live.
        dtype: Type of the parameters.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or `position_bias` is not one of the three.

    Example:
        >>> import torch, tost
        >>> attention = tost.CausalTSSAttention(embed_dim=64, num_heads=4, max_length=128)
        >>> first, state = attention.forward_with_state(torch.randn(1, 100, 64))
        >>> second, state = attention.forward_with_state(torch.randn(1, 1, 64), state)
        >>> second.shape, state.position.tolist()
        (torch.Size([1, 1, 64]), [101])
    """

    causal: ClassVar[bool] = True
    accepts = Accepts(packing=True, shared=True, state=TSSAState)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int,
        *,
        in_bias: bool = False,
        out_bias: bool = False,
        position_bias: Literal["feature", "head"] | None = "feature",
        gain_drop: float = 0.0,
        out_drop: float = 0.0,
        paper: PaperForm | None = None,
        head_dim: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        projected = (embed_dim, num_heads, in_bias, out_bias, out_drop, paper, head_dim)
        super().__init__(*projected, backend, device, dtype)
        if position_bias not in ("feature", "head", None):
            raise ValueError(f"position_bias={position_bias!r} is not known; it takes 'feature', 'head' or None.")
        self.max_length, self.gain_drop, self.position_bias_form = max_length, gain_drop, position_bias
        self.position_bias: nn.Parameter | None = None
        if position_bias is not None:
            self.position_bias = nn.Parameter(torch.zeros(num_heads, max_length, device=device, dtype=dtype))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        packing: Packing | None = None,
        carry: Carry | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Mix the tokens x [B, N, C], each with those before it.

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``, padding on either side.
            packing: Where the sequences begin, if several are packed into a row. Each is taken alone, and states have S
                entries.
            carry: A state to continue from, which is replaced by the one after these tokens; see `forward_with_state`.
            attn_mask: The same as timm and torch pass it, with or without the causal order; see `TSSAttention.forward`.
            is_causal: For callers of other attention modules, which may say False and pass a causal mask; ignored.

        Returns:
            ``[B, N, C]``.

        Raises:
            ValueError: `attn_mask` says more than which tokens are real and which come first.
            BackendError: Sequences are packed, and processes share them, but `packing` is that of one process.
        """
        mask = real_tokens(x, mask, attn_mask, causal=self.causal)
        state = None if carry is None else carry.state
        y, after = causal_tssa_with_state(
            self._tokens(x),
            self._temperatures(),
            self.bias(),
            mask=mask,
            cu_seqlens=packing,
            state=state,
            backend=self.backend,
            overwrite=self._owns_tokens(),
        )
        if carry is not None:
            carry.state = after
        if self.training and self.gain_drop > 0:
            y = F.dropout(y, self.gain_drop)  # y is proportional to D, entry by entry
        count = None if self.paper.step_size is None else self._count(x, state, mask, packing)
        return self._project_out(y, count)

    def bias(self) -> Tensor | None:
        """Return the position bias as the operator takes it, ``[H, max_length]``; None if there is none."""
        if self.position_bias is not None and self.position_bias_form == "head":
            return self.position_bias / self.head_dim
        return self.position_bias

    @staticmethod
    def _count(x: Tensor, state: TSSAState | None, mask: Tensor | None, packing: Packing | None) -> Tensor:
        """Return j, the number of real tokens up to and including each one, [B or 1, N, 1]."""
        start = None if state is None else state.position
        places = token_positions(x.shape[1], mask=mask, start=start, device=x.device, packing=packing)
        return (places + 1).unsqueeze(-1)


class GatedTSSAttention(nn.Module, ContinuesPacked[GatedState]):
    """Causal token statistics over gated windows: content and recall from a state of constant size (not in the paper).

    .. code-block:: text

        y = proj_out( silu(proj_gate(x)) * norm( gated_tssa(proj_in(x), sigmoid(proj_write(x))) ) )

    See `tost.gated_tssa` for the operator; `norm` divides each head by its root mean square. There are no positions:
    the windows give the order, and a convolution in front of the layer tells neighbors apart.

    Args:
        embed_dim: Width of the tokens, C.
        num_heads: Number of heads, H; divides C.
        max_length: Longest initial window in tokens: the blocks of a head start with half-lives from 4 tokens to this
            length, at equal ratios. Sequences may be longer.
        block_size: Features in a block, g; divides C / H. 1 has the smallest state, 8 and more recall.
        in_bias: Bias of the projection of gates. One of tokens would have no effect on differences from their mean.
        out_bias: Bias of the output projection.
        out_drop: Dropout on the output.
        backend: Implementation of the operator, see `tost.gated_tssa`.
        device: Where the parameters live.
        dtype: Type of the parameters.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or `block_size` not a head.

    Example:
        >>> import torch, tost
        >>> attention = tost.GatedTSSAttention(embed_dim=64, num_heads=4, block_size=8)
        >>> first, state = attention.forward_with_state(torch.randn(1, 100, 64))
        >>> second, state = attention.forward_with_state(torch.randn(1, 1, 64), state)
        >>> second.shape, state.covariance.shape
        (torch.Size([1, 1, 64]), torch.Size([1, 4, 72]))
    """

    accepts = Accepts(packing=True, shared=True, state=GatedState)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int = 1024,
        *,
        block_size: int = 8,
        in_bias: bool = False,
        out_bias: bool = False,
        out_drop: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check_blocks(embed_dim // num_heads, block_size)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.max_length, self.block_size, self.out_drop, self.backend = max_length, block_size, out_drop, backend
        factory: Factory = {"device": device, "dtype": dtype}
        self.proj_in = nn.Linear(embed_dim, embed_dim, bias=False, **factory)
        self.proj_gate = nn.Linear(embed_dim, embed_dim, bias=in_bias, **factory)
        self.proj_write = nn.Linear(embed_dim, embed_dim // block_size, **factory)
        self.norm_weight = nn.Parameter(torch.ones(embed_dim, **factory))
        self.proj_out = nn.Linear(embed_dim, embed_dim, bias=out_bias, **factory)
        self.reset_scale()

    @torch.no_grad()
    def reset_scale(self) -> None:
        """Initialize tokens with variance 1 and windows of different lengths.

        Models that initialize their weights call it afterwards.
        """
        nn.init.normal_(self.proj_in.weight, std=self.embed_dim**-0.5)
        shortest, longest = math.log(min(4, self.max_length)), math.log(self.max_length)
        half_lives = torch.linspace(shortest, longest, self.head_dim // self.block_size, dtype=torch.float64).exp()
        logit = torch.expm1(math.log(2) / half_lives).log()  # of z, where 1 - z = 2^(-1 / half-life)
        self.proj_write.bias.copy_(logit.repeat(self.num_heads))

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, block_size={self.block_size}, "
            f"backend={self.backend!r}"
        )

    def write(self, x: Tensor) -> Tensor:
        """Return the write gates of tokens x [B, N, C], ``[B, N, H, D / g]`` in [0, 1], float32 or better."""
        logit: Tensor = self.proj_write(x)
        blocks = (self.num_heads, self.head_dim // self.block_size)
        return logit.to(statistics_dtype(x.dtype)).sigmoid().reshape(*x.shape[:2], *blocks)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        packing: Packing | None = None,
        carry: Carry | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Mix the tokens x [B, N, C], each with those before it; arguments as in `CausalTSSAttention.forward`."""
        check_width(x, self.embed_dim)
        mask = real_tokens(x, mask, attn_mask, causal=True)
        w = self.proj_in(x).reshape(*x.shape[:2], self.num_heads, self.head_dim)
        state = None if carry is None else carry.state
        y, after = gated_tssa_with_state(
            w, self.write(x), mask=mask, cu_seqlens=packing, state=state, backend=self.backend
        )
        if carry is not None:
            carry.state = after
        y = normed_heads(y, self.norm_weight).flatten(2)
        y = y * gate_of(self.proj_gate(x), mask).to(y.dtype)
        return F.dropout(self.proj_out(y), self.out_drop, self.training)
