"""Residual blocks: a token mixer and a feed-forward, each with a norm, a residual connection and perhaps a layer scale.

Shapes: x [B, N, C] (batch, tokens, width), mask [B, N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, Literal, TypeAlias, Unpack

import torch
from torch import Tensor, nn

from tost import parallel
from tost.errors import ConfigError
from tost.nn._checks import Factory
from tost.nn.conv import CausalConvolution
from tost.nn.mixers.base import accepted, mix
from tost.nn.recompute import is_recomputing
from tost.nn.recompute import recompute as recompute_block
from tost.nn.state import BlockState, Carry, ContinuesPacked, MixerState
from tost.ops import Packing
from tost.ops._checks import check_mask
from tost.ops._numerics import statistics_dtype, zero_padding

Grid: TypeAlias = tuple[int, int]


class Block(nn.Module):
    """A residual block around any token mixer.

    .. code-block:: text

        pre:   x = x + gamma1 * attention(norm1(x)),  x = x + gamma2 * mlp(norm2(x))
        post:  x = norm1(x + gamma1 * attention(x)),  x = norm2(x + gamma2 * mlp(x))

    A feed-forward whose class has ``residual = False``, as `ISTA` does, replaces the tokens: ``x = mlp(norm2(x))`` or
    ``x = norm2(mlp(x))``, without layer scale and drop path.

    Args:
        attention: Mixes tokens; called as ``attention(x, mask)``, from ``[B, N, C]`` to ``[B, N, C]``.
        mlp: Transforms each token alone; called as ``mlp(x)``.
        embed_dim: Width of the tokens, C.
        norm: Place of the LayerNorms: ``"pre"``, before the branches, or ``"post"``, after the sums.
        norm_bias: Biases of the LayerNorms.
        norm_eps: Added to the variance in the LayerNorms.
        layer_scale: Initial value of the learned vectors gamma1 and gamma2; None has none.
        drop_path: Stochastic depth: the probability that a sequence skips a branch in training. Branches that are
            kept are scaled by ``1 / (1 - drop_path)``, so that evaluation needs no correction.
        conv: Adds neighbours to what the attention sees, ``u + conv(u)``, such as `SequenceConvolution`. One with
            ``accepts.grid``, as `GridConvolution` has it, is called with ``grid=``.
        conv_mlp: The same for the feed-forward.
        conv_block: The same for the tokens themselves, before anything else: ``x = x + conv_block(x)``, a conditional
            position encoding. Not for causal blocks.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        ValueError: `norm` is neither of the two, `drop_path` is not a probability below 1, or a causal block is given
            `conv_block` or a convolution that is not causal.

    Example:
        >>> import torch, tost
        >>> block = tost.nn.Block(tost.TSSAttention(64, 4), tost.nn.MLP(64, 256), 64)
        >>> block(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    conv_kind: ClassVar[type[nn.Module]] = nn.Module
    """Type of the convolutions."""

    gamma1: nn.Parameter | None
    gamma2: nn.Parameter | None

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        embed_dim: int,
        *,
        norm: Literal["pre", "post"] = "pre",
        norm_bias: bool = True,
        norm_eps: float = 1e-5,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        conv: nn.Module | None = None,
        conv_mlp: nn.Module | None = None,
        conv_block: nn.Module | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm={norm!r} is not known; it takes 'pre' or 'post'.")
        for one in (conv, conv_mlp):
            if one is not None and not isinstance(one, self.conv_kind):
                raise ValueError(
                    f"a causal block takes no convolution of type {type(one).__name__}, which may see tokens that are "
                    "still to come; use CausalConvolution."
                )
        if conv_block is not None and self.conv_kind is not nn.Module:
            raise ValueError("a causal block takes no conv_block; use conv or conv_mlp, in front of its branches.")
        if not 0 <= drop_path < 1:
            raise ValueError(f"drop_path={drop_path} is not possible; it takes a probability from 0 to below 1.")
        self.norm, self.drop_path = norm, drop_path
        self.conv_block = conv_block
        self.norm1 = nn.LayerNorm(embed_dim, eps=norm_eps, bias=norm_bias, **factory)
        self.conv = conv
        self.attention = attention
        self.norm2 = nn.LayerNorm(embed_dim, eps=norm_eps, bias=norm_bias, **factory)
        self.mlp = mlp
        self.conv_mlp = conv_mlp
        self.residual_mlp: bool = getattr(mlp, "residual", True)
        for name, wanted in (("gamma1", True), ("gamma2", self.residual_mlp)):
            scale = None if layer_scale is None or not wanted else layer_scale
            gamma = None if scale is None else torch.full((embed_dim,), scale, **factory)
            self.register_parameter(name, None if gamma is None else nn.Parameter(gamma))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, grid: Grid | None = None, *, packing: Packing | None = None
    ) -> Tensor:
        """Transform the tokens x [B, N, C].

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``.
            grid: Rows and columns of the tokens; needed by a block with convolutions over a grid, and by no other.
            packing: Where the sequences begin, if several are packed into a row. An attention that does not know
                packed sequences sees them padded to the longest.

        Returns:
            ``[B, N, C]``. What comes out for padding means nothing and reaches no other token.

        Raises:
            ConfigError: Sequences are packed, but the block has a convolution over a grid.
        """
        return self._run(x, mask, grid, packing, (None, None, None))

    def _run(
        self,
        x: Tensor,
        mask: Tensor | None,
        grid: Grid | None,
        packing: Packing | None,
        carries: tuple[Carry | None, Carry | None, Carry | None],
    ) -> Tensor:
        """Run both branches, with the carries of the attention and of the two convolutions in front of the branches."""
        pre, (carry, carry_conv, carry_mlp) = self.norm == "pre", carries
        x = with_neighbours(x, self.conv_block, mask, grid, packing)
        u = with_neighbours(self.norm1(x) if pre else x, self.conv, mask, grid, packing, carry_conv)
        x = self._add(x, mix(self.attention, u, mask, packing, grid, carry), self.gamma1, packing)
        x = x if pre else self.norm1(x)
        fed = self.mlp(with_neighbours(self.norm2(x) if pre else x, self.conv_mlp, mask, grid, packing, carry_mlp))
        x = self._add(x, fed, self.gamma2, packing) if self.residual_mlp else fed
        return x if pre else self.norm2(x)

    def extra_repr(self) -> str:
        """Show the layout in ``print(module)``."""
        return f"norm={self.norm!r}, layer_scale={self.gamma1 is not None}, drop_path={self.drop_path}"

    def _add(self, x: Tensor, branch: Tensor, gamma: Tensor | None, packing: Packing | None) -> Tensor:
        """Return x plus the scaled branch; all scales are small and act in one pass over the tokens."""
        if self.training and self.drop_path > 0:
            kept = _keep_sequences(x, 1 - self.drop_path, packing)
            gamma = kept if gamma is None else gamma * kept
        return x + branch if gamma is None else torch.addcmul(x, gamma, branch)


def with_neighbours(
    x: Tensor,
    conv: nn.Module | None,
    mask: Tensor | None,
    grid: Grid | None,
    packing: Packing | None = None,
    carry: Carry | None = None,
) -> Tensor:
    """Return ``x + conv(x)`` for tokens x [B, N, C], or x without a convolution; see `tost.nn.mixers.base.mix`."""
    return x if conv is None else x + mix(conv, x, mask, packing, grid, carry)


def _keep_sequences(x: Tensor, probability: float, packing: Packing | None) -> Tensor:
    """Return ``1 / probability`` for sequences that keep a branch and 0 for the others, [B, 1 or N, 1]."""
    sequences = x.shape[0] if packing is None else packing.num_sequences
    chances = torch.full((sequences, 1, 1), probability, dtype=torch.float32, device=x.device)
    kept = (chances.bernoulli() / probability).to(x.dtype)
    if (context := parallel.active()) is not None:
        kept = context.share(kept)  # the pieces of a sequence stay together
    return kept if packing is None else packing.of_tokens(kept.squeeze(1))


class CausalBlock(Block, ContinuesPacked[MixerState | BlockState]):
    """A `Block` with causal attention, which can continue a sequence from a state.

    Arguments are those of `Block`. The convolutions are `CausalConvolution`, called as ``conv(u, mask)``, and the
    attention needs ``forward_with_state``, as `CausalTSSAttention` has it, to continue a sequence. The state of a block
    is that of its attention, in a `BlockState` if there are convolutions.

    Example:
        >>> import torch, tost
        >>> block = tost.nn.CausalBlock(tost.CausalTSSAttention(64, 4, 128), tost.nn.MLP(64, 256), 64)
        >>> first, state = block.forward_with_state(torch.randn(1, 100, 64))
        >>> second, state = block.forward_with_state(torch.randn(1, 1, 64), state)
        >>> second.shape, state.position.tolist()
        (torch.Size([1, 1, 64]), [101])
    """

    conv_kind: ClassVar[type[nn.Module]] = CausalConvolution
    conv: CausalConvolution | None
    conv_mlp: CausalConvolution | None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        grid: Grid | None = None,
        *,
        packing: Packing | None = None,
        carry: Carry | None = None,
    ) -> Tensor:
        """Transform the tokens x [B, N, C].

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``.
            grid: None; a sequence has no rows and columns.
            packing: Where the sequences begin, if several are packed into a row; states then have S entries.
            carry: A state to continue from, which is replaced by the one after these tokens; see `forward_with_state`.

        Returns:
            ``[B, N, C]``. What comes out for padding means nothing and reaches no other token.

        Raises:
            ConfigError: There is a carry, but the attention has no method ``forward_with_state``.
            ValueError: Its state came from another kind of block.
        """
        if carry is None:
            return super().forward(x, mask, grid, packing=packing)
        if not hasattr(self.attention, "forward_with_state"):
            raise ConfigError(
                f"{type(self.attention).__name__} has no forward_with_state, so this model cannot continue a sequence "
                "or generate; use it on whole sequences, or choose another mixer."
            )
        convs = (self.conv, self.conv_mlp)
        before, windows = self._parts(carry.state, sum(conv is not None for conv in convs))
        rest = iter(windows)
        first, second = (None if conv is None else Carry(next(rest, None)) for conv in convs)
        mixer = Carry(before)
        x = self._run(x, mask, None, packing, (mixer, first, second))
        after = tuple(one.state for one in (first, second) if one is not None)
        carry.state = BlockState(mixer.state, after) if after else mixer.state
        return x

    def _parts(
        self, state: MixerState | BlockState | None, num_windows: int
    ) -> tuple[MixerState | None, tuple[Tensor, ...]]:
        """Return the state of the attention and the windows of the convolutions, if it is a state of such a block."""
        if state is None:
            return None, ()
        mixer, windows = state if isinstance(state, BlockState) else (state, ())
        kind = accepted(self.attention).state
        if (kind is not None and not isinstance(mixer, kind)) or len(windows) != num_windows:
            raise ValueError(
                f"the state is a {type(mixer).__name__} with {len(windows)} windows of convolutions, but this block "
                f"has {type(self.attention).__name__} and {num_windows} of them; pass the state that the same model "
                "returned, or None at the start of a sequence."
            )
        return mixer, windows


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    mask: Tensor | None = None,
    *,
    grid: Grid | None = None,
    packing: Packing | None = None,
    recompute: bool = False,
) -> Tensor:
    """Apply blocks one after the other.

    Args:
        blocks: Modules called as ``block(x, mask)``, or ``block(x, mask, grid)`` where there is a grid; where sequences
            are packed, with ``packing=`` too.
        x: Tokens, ``[B, N, C]``.
        mask: Real tokens, bool ``[B, N]``.
        grid: Rows and columns of the tokens, for blocks with a convolution.
        packing: Where the sequences begin, if several are packed into a row.
        recompute: Keep only the input of each block for the backward pass and compute the rest again (gradient
            checkpointing): less memory, a third more work, the same gradients.

    Returns:
        ``[B, N, C]``.
    """
    arguments = (mask,) if grid is None else (mask, grid)
    for block in blocks:
        run = block if packing is None else partial(block, packing=packing)
        again = recompute and torch.is_grad_enabled()
        x = recompute_block(run, x, *arguments) if again else run(x, *arguments)
    return x


class TokenBatchNorm(nn.Module):
    """Batch norm over all real tokens of all sequences of a batch.

    In training, mean and variance are those of the batch; averages of both are kept for evaluation. Padding has no part
    in them. A batch counts once, also where a block is computed again in the backward pass. Where several processes
    share a batch, `share` makes it one batch; without it each process normalizes its own sequences.

    Args:
        embed_dim: Width of the tokens, C.
        eps: Added to the variance.
        momentum: Weight of a batch in the averages.
        **factory: `device` and `dtype` of the parameters.

    Example:
        >>> import torch
        >>> from tost.nn.mixers import TokenBatchNorm
        >>> TokenBatchNorm(64)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    running_mean: Tensor
    running_var: Tensor
    _sum: Callable[[Tensor], Tensor] | None = None

    def __init__(self, embed_dim: int, *, eps: float = 1e-5, momentum: float = 0.1, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.embed_dim, self.eps, self.momentum = embed_dim, eps, momentum
        self.weight = nn.Parameter(torch.ones(embed_dim, **factory))
        self.bias = nn.Parameter(torch.zeros(embed_dim, **factory))
        self.register_buffer("running_mean", torch.zeros(embed_dim, **factory))
        self.register_buffer("running_var", torch.ones(embed_dim, **factory))

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"{self.embed_dim}, eps={self.eps}, momentum={self.momentum}"

    def share(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Take mean and variance over the batches of several processes.

        Args:
            sum_over_processes: Returns the sum of a tensor over the processes, with its derivative.
        """
        self._sum = sum_over_processes

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize the tokens x [B, N, C]; those that are not real, by `mask` [B, N], do not count."""
        check_mask(mask, x)
        wide = zero_padding(x, mask).to(statistics_dtype(x.dtype))
        if self.training:
            mean, variance = self._statistics(wide, mask)
        else:
            mean, variance = self.running_mean.to(wide.dtype), self.running_var.to(wide.dtype)
        scale = self.weight * (variance + self.eps).rsqrt()
        return ((wide - mean) * scale + self.bias).to(x.dtype)

    def _statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance [C] of a batch, padded with zeros, and update the averages."""
        total = self._sum or (lambda part: part)
        count = x.new_full((), x.shape[0] * x.shape[1]) if mask is None else mask.sum().to(x.dtype)
        count = total(count).clamp_min(1)
        mean = total(x.sum(dim=(0, 1))) / count
        variance = total(zero_padding(x - mean, mask).square().sum(dim=(0, 1))) / count
        if not is_recomputing():
            unbiased = variance.detach() * (count / (count - 1).clamp_min(1))
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return mean, variance


class MixerBlock(nn.Module):
    """A residual block of a mixer alone.

    .. code-block:: text

        pre:   x = x + mixer(norm(x))
        post:  x = norm(x + mixer(x))

    Args:
        mixer: Mixes tokens; called as ``mixer(x, mask)``, from ``[B, N, C]`` to ``[B, N, C]``.
        embed_dim: Width of the tokens, C.
        norm: Place of the norm: ``"pre"`` or ``"post"``.
        norm_kind: ``"batch"``, see `TokenBatchNorm`, or ``"layer"``.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        ValueError: `norm` or `norm_kind` is not known.

    Example:
        >>> import torch, tost
        >>> from tost.nn.mixers import MixerBlock
        >>> MixerBlock(tost.nn.S4(64, 1, max_length=10), 64)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        mixer: nn.Module,
        embed_dim: int,
        *,
        norm: Literal["pre", "post"] = "pre",
        norm_kind: Literal["batch", "layer"] = "batch",
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post") or norm_kind not in ("batch", "layer"):
            raise ValueError(f"norm={norm!r} takes 'pre' or 'post', norm_kind={norm_kind!r} takes 'batch' or 'layer'.")
        self.norm, self.attention = norm, mixer
        kind: type[TokenBatchNorm | nn.LayerNorm] = TokenBatchNorm if norm_kind == "batch" else nn.LayerNorm
        self.norm1 = kind(embed_dim, **factory)

    def extra_repr(self) -> str:
        """Show the layout in ``print(module)``."""
        return f"norm={self.norm!r}"

    def forward(self, x: Tensor, mask: Tensor | None = None, *, packing: Packing | None = None) -> Tensor:
        """Transform the tokens x [B, N, C], with `mask` [B, N] of the real ones; returns [B, N, C]."""
        if self.norm == "post":
            return self._normed(x + mix(self.attention, x, mask, packing), mask)
        return x + mix(self.attention, self._normed(x, mask), mask, packing)

    def _normed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.norm1(x) if isinstance(self.norm1, nn.LayerNorm) else self.norm1(x, mask)
