"""S4 and S4D: a long convolution per channel, whose kernel is that of a state space model.

Shapes: x [B, N, C] (batch, tokens, width), kernel [R, C, N] with R directions, mask [B, N].
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn._checks import check_heads, check_memory, check_width, refuse_context
from tost.nn.mixers._order import real_first, real_last
from tost.nn.mixers.s4_kernels import DiagonalKernel, Init, LowRankKernel
from tost.nn.state import Carry, Continues, RecurrentState
from tost.ops._checks import check_mask
from tost.ops._numerics import num_tokens, statistics_dtype, zero_padding


def long_convolution(u: Tensor, kernel: Tensor) -> Tensor:
    """Convolve sequences with kernels as long as they are, by a Fourier transform.

    .. code-block:: text

        y[n] = sum_{m <= n} kernel[0, n - m] u[m]  +  sum_{m > n} kernel[1, m - n - 1] u[m]

    Args:
        u: ``[B, C, N]``.
        kernel: ``[R, C, N]``; R = 1 leaves out the second sum.

    Returns:
        ``[B, C, N]``.
    """
    N = u.shape[-1]
    # Twice the length, so that nothing comes round from the other end; there is room for the second kernel, backwards.
    both = F.pad(kernel[0], (0, N))
    if kernel.shape[0] == 2:
        both = both + F.pad(kernel[1].flip(-1), (N, 0))
    y: Tensor = torch.fft.irfft(torch.fft.rfft(u, n=2 * N) * torch.fft.rfft(both), n=2 * N)
    return y[..., :N]


class S4(nn.Module):
    """The layer of S4 (Gu et al., 2022): a convolution along the tokens, then a gated projection of each token.

    .. code-block:: text

        y[n]   = convolution(x)[n] + d * x[n]
        out[n] = GLU( proj_out( dropout( gelu(y[n]) ) ) )

    There is no projection in front. The kernel belongs to a state space model for each channel; see `LowRankKernel`
    (``"s4"``) and `DiagonalKernel` (``"s4d-lin"``, ``"s4d-legs"``). The cost is that of a Fourier transform. Steps and
    state matrices are named in `kernel_parameters`: they are trained with a small learning rate and without decay.

    Padding counts as zeros after the last real token, and tokens that a mask leaves between them are moved
    together, so a mask is a deletion. What comes out for padding is that of zeros: ``GLU(bias)``.

    Args:
        embed_dim: Width of the tokens, C; every feature is a channel.
        num_heads: Number of different state matrices; divides C. All channels of one have their own step and output.
        max_length: Longest sequence; needed by ``kernel="s4"``, the others have no limit.
        state_size: States per channel, counted with their conjugates; even.
        kernel: ``"s4"``, ``"s4d-lin"`` or ``"s4d-legs"``.
        bidirectional: With a second kernel that runs backwards, so that each token sees those after it too.
        step: Range of the initial steps, which are log-uniform in it. Path-X has (0.0001, 0.1).
        drop: Dropout in front of the projection.
        tied_drop: One decision of the dropout for all tokens of a sequence and feature.
        device: Where the parameters live.
        dtype: Type of the parameters.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, or another argument is out of its range.

    Example:
        >>> import torch, tost
        >>> tost.nn.S4(64, 1, max_length=100, state_size=8)(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = tuple(
        f"kernel.{name}" for name in ("log_step", "log_decay", "frequency", "b", "p")
    )
    """Parameters with a learning rate of their own and without weight decay, where there are any."""

    kernel: LowRankKernel | DiagonalKernel

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_length: int | None = None,
        state_size: int = 64,
        kernel: Literal["s4", "s4d-lin", "s4d-legs"] = "s4",
        bidirectional: bool = True,
        step: tuple[float, float] = (1e-3, 1e-1),
        drop: float = 0.0,
        tied_drop: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        _check_options(kernel, max_length, state_size, step)
        self.embed_dim, self.num_heads, self.bidirectional = embed_dim, num_heads, bidirectional
        self.drop, self.tied_drop = drop, tied_drop
        sizes = (embed_dim, num_heads, state_size, 2 if bidirectional else 1)
        if kernel == "s4" and max_length is not None:
            self.kernel = LowRankKernel(*sizes, max_length=max_length, step=step, device=device, dtype=dtype)
        else:
            init: Init = "lin" if kernel == "s4d-lin" else "legs"
            self.kernel = DiagonalKernel(*sizes, step=step, init=init, device=device, dtype=dtype)
        self.d = nn.Parameter(torch.randn(embed_dim, device=device, dtype=dtype))
        self.proj_out = nn.Linear(embed_dim, 2 * embed_dim, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(module)``."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, bidirectional={self.bidirectional}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the tokens x [B, N, C].

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``; the others do not count.

        Returns:
            ``[B, N, C]``.

        Raises:
            ValueError: `x` or `mask` has the wrong shape or dtype, or the sequence is too long for the kernel.
            BackendError: Context parallelism is active; this mixer needs whole sequences.
        """
        self._check(x, mask)
        return self._project_out(real_first(self._convolve, zero_padding(x, mask), mask), mask)

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        refuse_context(type(self).__name__)
        check_width(x, self.embed_dim)
        check_mask(mask, x)
        limit = self.kernel.max_length if isinstance(self.kernel, LowRankKernel) else x.shape[1]
        if x.shape[1] > limit:
            raise ValueError(
                f"the sequence has {x.shape[1]} tokens, but this module was made for max_length={limit}. "
                f"Use a shorter sequence, or build it with max_length={x.shape[1]} or more."
            )

    def _project_out(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output [B, N, C] of what comes out of the convolution."""
        y = F.gelu(zero_padding(y, mask))
        if self.training and self.drop > 0:
            shape = (y.shape[0], 1, y.shape[2]) if self.tied_drop else y.shape
            y = y * F.dropout(y.new_ones(shape), self.drop)
        return F.glu(self.proj_out(y), dim=-1)

    def _convolve(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the convolution of x [B, N, C] plus its direct share; padding is zero and at the end."""
        if x.shape[1] == 0:
            return x
        with _full_precision(x):
            u = x.to(statistics_dtype(x.dtype)).transpose(1, 2)
            y = long_convolution(u, self.kernel(x.shape[1]).to(u.dtype)).transpose(1, 2)
        return (y + self.d * x).to(x.dtype)


class CausalS4D(S4, Continues[RecurrentState]):
    """S4D in one direction, which can go on with a sequence from its states.

    .. code-block:: text

        h[n] = exp(step A) h[n-1] + (exp(step A) - 1) / A  x[n]          memory [C, state_size]
        y[n] = 2 Re(c h[n]) + d * x[n],   the rest as in `S4`

    A whole piece is convolved, and what the states before it leave in its tokens is added. Arguments are those of `S4`
    without `bidirectional` and `max_length`.

    Example:
        >>> import torch, tost
        >>> mixer = tost.nn.CausalS4D(64, 1, state_size=16)
        >>> _, state = mixer.forward_with_state(torch.randn(1, 100, 64))
        >>> state.memory.shape
        torch.Size([1, 64, 16])
    """

    state_kind: ClassVar[type] = RecurrentState
    kernel: DiagonalKernel

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        state_size: int = 64,
        kernel: Literal["s4d-lin", "s4d-legs"] = "s4d-legs",
        step: tuple[float, float] = (1e-3, 1e-1),
        drop: float = 0.0,
        tied_drop: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            state_size=state_size,
            kernel=kernel,
            bidirectional=False,
            step=step,
            drop=drop,
            tied_drop=tied_drop,
            device=device,
            dtype=dtype,
        )

    def memory_shape(self) -> tuple[int, ...]:
        """Return the shape of the memory of one sequence: for each channel real and imaginary parts of its states."""
        return self.embed_dim, 2 * self.kernel.pairs

    def forward(self, x: Tensor, mask: Tensor | None = None, *, carry: Carry | None = None) -> Tensor:
        """Mix the tokens x [B, N, C], each with those before it.

        Args:
            x: Tokens, ``[B, N, C]``.
            mask: Real tokens, bool ``[B, N]``, padding anywhere; the others do not count.
            carry: A state to continue from, which is replaced by the one after these tokens; see `forward_with_state`.

        Returns:
            ``[B, N, C]``.

        Raises:
            ValueError: `x`, `mask` or the state has the wrong shape or dtype.
            BackendError: Context parallelism is active; this mixer needs whole sequences.
        """
        if carry is None:
            return super().forward(x, mask)
        self._check(x, mask)
        before = RecurrentState.empty(x, *self.memory_shape()) if carry.state is None else carry.state
        check_memory(before.memory, len(x), self.memory_shape())
        x = zero_padding(x, mask)
        count = num_tokens(x, mask)
        with _full_precision(x):
            states = before.memory.reshape(len(x), self.embed_dim, -1, 2)
            u = real_last(x, mask).to(states.dtype).transpose(1, 2)
            memory = self.kernel.advance(states, u, count).to(states.dtype).flatten(2)
        carry.state = RecurrentState(memory, before.position + count)
        return self._project_out(real_first(partial(self._continue, states), x, mask), mask)

    def _continue(self, states: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the convolution of x [B, N, C] with what the states [B, C, N/2, 2] before it add."""
        with _full_precision(x):
            left = self.kernel.respond(states, x.shape[1]).transpose(1, 2)
        return (self._convolve(x, mask) + left).to(x.dtype)


def _full_precision(x: Tensor) -> torch.autocast:
    """Turn autocast off: Fourier transforms have no half precision, and products would bring it back."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def _check_options(kernel: str, max_length: int | None, state_size: int, step: tuple[float, float]) -> None:
    if kernel not in ("s4", "s4d-lin", "s4d-legs"):
        raise ValueError(f"kernel={kernel!r} is not known; it takes 's4', 's4d-lin' or 's4d-legs'.")
    if kernel == "s4" and (max_length is None or max_length < 1):
        raise ValueError(f"kernel='s4' needs max_length, the longest sequence, but it is {max_length}; set it.")
    if state_size < 2 or state_size % 2:
        raise ValueError(f"state_size={state_size} is not possible: states come in pairs; use an even number.")
    if not 0 < step[0] <= step[1]:
        raise ValueError(f"step={step} is not a range of positive numbers; use for example (0.001, 0.1).")
