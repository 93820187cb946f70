"""S4 and S4D: a long convolution per channel, with the kernel of a state space model.

Each of the C channels is a linear system ``x' = A x + B u, y = 2 Re(c x)`` whose N states come in conjugate pairs, of
which one is kept. Channels are divided among G groups; those of a group share A and B.

Shapes: x [B, N, C] (batch, tokens, width), kernel [R, C, L] with R directions, A and B [G, N/2], c [R, C, N/2], steps
[C], mask [B, N]. Complex parameters are stored as pairs of reals, [..., 2]: optimizers, files and half precision
support those.
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.nn._checks import Factory, check_heads, check_memory, check_width, refuse_context
from tost.nn.mixers.base import Accepts, real_first, real_last
from tost.nn.recompute import recompute
from tost.nn.state import Carry, Continues, RecurrentState
from tost.ops._checks import check_mask
from tost.ops._numerics import num_tokens, statistics_dtype, zero_padding

LARGEST_TABLE = 2**21
"""Entries of the table of frequencies, channels and states that is held at a time."""


def hippo_legs(state_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonalize the HiPPO-LegS matrix up to a term of rank one.

    .. code-block:: text

        A[i,j] = -sqrt(2i+1) sqrt(2j+1) for i > j,  -(i+1) for i = j,  0 above
        B[i]   = sqrt(2i+1),   P[i] = sqrt(i+1/2)
        A = V (diag(lambda) - p p*) V*,   b = V* B,   p = V* P

    ``A + P P^T`` is -1/2 plus a skew matrix, so V is unitary. The phases of its columns are free; they are chosen such
    that b is real and positive, which makes the result the same on every machine.

    Args:
        state_size: N, even.

    Returns:
        lambda, b and p of the N/2 eigenvalues with negative imaginary part, complex128 ``[N/2]`` each, on the CPU.
    """
    i = torch.arange(state_size, dtype=torch.float64, device="cpu")
    roots = (2 * i + 1).sqrt()
    a = -(roots[:, None] * roots).tril(-1) - (i + 1).diag()
    p = (i + 0.5).sqrt()
    skew = a + p[:, None] * p + 0.5 * torch.eye(state_size, dtype=torch.float64, device="cpu")
    frequencies, v = torch.linalg.eigh(-1j * skew)
    half = slice(0, state_size // 2)  # in ascending order, so these are the negative ones
    inverse = v[:, half].mH
    b = inverse @ roots.to(v.dtype)
    phases = (b / b.abs()).conj()
    eigenvalues = torch.complex(torch.full_like(frequencies[half], -0.5), frequencies[half])
    return eigenvalues, b * phases, (inverse @ p.to(v.dtype)) * phases


class _Own(Factory, total=False):
    """Arguments of both kernels that they pass on."""

    step: tuple[float, float]


class _Kernel(nn.Module):
    """Common to both kernels: steps per channel, eigenvalues per group, an output vector per direction and channel.

    Args:
        channels: C.
        groups: G; divides C.
        state_size: N, even.
        directions: R.
        eigenvalues: At the start, ``[N/2]``.
        step: Range of the initial steps, which are log-uniform in it.
        **factory: `device` and `dtype` of the parameters.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        state_size: int,
        directions: int,
        eigenvalues: Tensor,
        *,
        step: tuple[float, float] = (1e-3, 1e-1),
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.channels, self.groups, self.pairs = channels, groups, state_size // 2
        low, high = (math.log(bound) for bound in step)
        self.log_step = nn.Parameter(torch.empty(channels, **factory).uniform_(low, high))
        self.log_decay, self.frequency = (
            nn.Parameter(torch.empty(groups, self.pairs, **factory).copy_(start))
            for start in ((-eigenvalues.real).log(), eigenvalues.imag)
        )
        # Real and imaginary part of variance 1/2 each: a complex standard normal number.
        drawn = torch.empty(directions, channels, self.pairs, 2, **factory).normal_(std=math.sqrt(0.5))
        self.c = nn.Parameter(drawn)

    def _steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the steps [C, 1], and real and imaginary parts of step * eigenvalue [C, N/2]."""
        step = _exact(self.log_step).exp().unsqueeze(-1)
        return step, -step * self._spread(_exact(self.log_decay).exp()), step * self._spread(_exact(self.frequency))

    def _spread(self, x: Tensor) -> Tensor:
        """Repeat the values of each group for its channels: [G, ...] to [C, ...]."""
        return x.repeat_interleave(self.channels // self.groups, dim=0)


class DiagonalKernel(_Kernel):
    """The kernel of S4D (Gu et al., 2022), with B = 1 and a zero-order hold.

    .. code-block:: text

        k[l] = 2 Re sum_n c[n] (exp(step A[n]) - 1) / A[n]  exp(l step A[n])

    It starts with the eigenvalues of `hippo_legs`. Arguments are those of `_Kernel`, without the eigenvalues.
    """

    def __init__(self, channels: int, groups: int, state_size: int, directions: int, **own: Unpack[_Own]) -> None:
        super().__init__(channels, groups, state_size, directions, hippo_legs(state_size)[0], **own)

    def forward(self, length: int) -> Tensor:
        """Return the first L entries of the kernels, [R, C, L]."""
        rate, b, c = self._system()
        return _read(2 * c * b, rate, length)

    def respond(self, states: Tensor, length: int) -> Tensor:
        """Return the share of the states in the next outputs: ``y[l] = 2 Re sum_n c[n] exp((l+1) step A[n]) x[n]``.

        Args:
            states: Before the first token, real and imaginary parts, ``[B, C, N/2, 2]``.
            length: Number of tokens, L.

        Returns:
            ``[B, C, L]``, of the first direction.
        """
        rate, _, c = self._system()
        return _read(2 * c[0] * rate.exp() * torch.view_as_complex(states), rate, length)

    def advance(self, states: Tensor, u: Tensor, count: Tensor) -> Tensor:
        """Return the states after some tokens: ``x[l] = exp(step A) x[l-1] + (exp(step A) - 1) / A u[l]``.

        Args:
            states: Before the first token, real and imaginary parts, ``[B, C, N/2, 2]``.
            u: Inputs, ``[B, C, L]``, the last one at the end; where a sequence has fewer, zeros come before the first.
            count: Number of tokens of each sequence, ``[B]``.

        Returns:
            ``[B, C, N/2, 2]``.
        """
        rate, b, _ = self._system()
        rows, columns = _two_tables(rate, u.shape[-1])
        cut = F.pad(u.flip(-1), (0, rows.shape[1] * columns.shape[1] - u.shape[-1]))
        cut = cut.reshape(*u.shape[:2], rows.shape[1], columns.shape[1])  # the last token first
        sums = torch.complex(cut @ columns.real, cut @ columns.imag)
        kept = (rate * count.to(rate.real.dtype)[:, None, None]).exp() * torch.view_as_complex(states)
        return torch.view_as_real(kept + b * (rows * sums).sum(dim=2))

    def _system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return step * A and the discrete B, [C, N/2] each, and c [R, C, N/2]."""
        step, real, imag = self._steps()
        rate = torch.complex(real, imag)
        return rate, (rate.exp() - 1) / rate * step, torch.view_as_complex(_exact(self.c))


class LowRankKernel(_Kernel):
    """The kernel of S4 (Gu et al., 2022): ``A = diag(lambda) - p p*``, discretized by the bilinear rule.

    It starts as HiPPO-LegS, see `hippo_legs`. The kernel is the inverse Fourier transform of its generating function

    .. code-block:: text

        K(w) = sum_{l<L} k[l] w^l = 2 / (1+w) ( r_cb - r_cp r_pb / (1 + r_pp) )          at the L-th roots of unity w
        r_uv = sum_n step u[n] v[n] / ( z - step lambda[n] ),   z = 2 (1-w) / (1+w)      over both states of a pair

    where c stands for ``c (I - a^L)`` of the discrete system: this is the parameter, and L is `max_length`. The sums
    are taken for pairs at once, in real numbers: on the unit circle z is imaginary. Frequencies go in pieces that are
    computed again in the backward pass, so that memory does not grow with length times states.

    Arguments are those of `_Kernel`, without the eigenvalues, plus:

    Args:
        max_length: L. Shorter kernels are the beginning of this one.
    """

    def __init__(
        self, channels: int, groups: int, state_size: int, directions: int, *, max_length: int, **own: Unpack[_Own]
    ) -> None:
        eigenvalues, b, p = hippo_legs(state_size)
        super().__init__(channels, groups, state_size, directions, eigenvalues, **own)
        self.max_length = max_length
        self.b, self.p = (
            nn.Parameter(self.c.new_empty(groups, self.pairs, 2).copy_(torch.view_as_real(start))) for start in (b, p)
        )
        with torch.no_grad():  # from the c that was drawn to the one that is learned
            a, _, c = self._dense(self.c)
            # Real and imaginary parts of a pair instead of its two states: all is real then, and four times as fast.
            half = torch.eye(self.pairs, dtype=a.dtype, device=a.device) * math.sqrt(0.5)
            basis = torch.cat((torch.cat((half, half), dim=1), torch.cat((-1j * half, 1j * half), dim=1)))
            power = torch.linalg.matrix_power((basis @ a @ basis.mH).real, max_length)
            cut = c - ((c.movedim(0, 1) @ basis.mH).real @ power).movedim(1, 0).to(c.dtype) @ basis
            self.c.copy_(torch.view_as_real(cut[..., : self.pairs]))

    def forward(self, length: int) -> Tensor:
        """Return the first entries of the kernels, [R, C, length]; at most `max_length` of them."""
        L = self.max_length
        angles = torch.arange(L // 2 + 1, dtype=torch.float64, device=self.c.device) * (2 * math.pi / L)
        step, real, imag = self._steps()
        values = (step, real, imag, self._residues(real, imag))
        piece = max(1, LARGEST_TABLE // (self.channels * self.pairs))
        if len(angles) <= piece:
            spectrum = _generating(angles.to(step.dtype), *values)
        else:
            pieces = (angles[at : at + piece].to(step.dtype) for at in range(0, len(angles), piece))
            spectrum = torch.cat([recompute(_generating, at, *values) for at in pieces], dim=-1)
        kernel: Tensor = torch.fft.irfft(spectrum, n=L)
        return kernel[..., :length]

    def _dense(self, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the discrete system ``x[l+1] = a x[l] + b u[l+1], y[l] = c x[l]`` with both states of every pair."""
        step, real, imag = self._steps()
        rate = _pairs(torch.complex(real, imag))
        b, p = (_pairs(self._spread(torch.view_as_complex(_exact(x)))) for x in (self.b, self.p))
        a = torch.diag_embed(rate) - step.unsqueeze(-1) * p.unsqueeze(-1) * p.conj().unsqueeze(-2)
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        half = eye - a / 2
        b = torch.linalg.solve(half, (step * b).unsqueeze(-1)).squeeze(-1)
        return torch.linalg.solve(half, eye + a / 2), b, _pairs(torch.view_as_complex(_exact(c)))

    def _residues(self, real: Tensor, imag: Tensor) -> Tensor:
        """Return 2 Re(u v) and 2 Re(u v conj(step lambda)), each for cb and cp of every direction, pb and pp.

        The shape is [C, N/2, 2, 2 R + 2].
        """
        c = torch.view_as_complex(_exact(self.c))
        b, p = (self._spread(torch.view_as_complex(_exact(x))) for x in (self.b, self.p))
        products = torch.cat((c * b, c * p, (p.conj() * b)[None], (p.conj() * p)[None])).movedim(0, -1)
        weighted = products.real * real.unsqueeze(-1) + products.imag * imag.unsqueeze(-1)
        return 2 * torch.stack((products.real, weighted), dim=-2)


def _generating(angles: Tensor, step: Tensor, real: Tensor, imag: Tensor, residues: Tensor) -> Tensor:
    """Return K(w) at ``w = exp(-i angle)``: complex [R, C, len(angles)].

    With ``s = 2 sin(angle/2)`` and ``k = cos(angle/2)`` the common phase of ``2 (1-w) = 2 i s e`` and ``1+w = 2 k e``
    leaves ``(z - step lambda)(z - conj) ~ |step lambda|^2 k^2 - s^2 - 2 i Re(step lambda) s k``, finite also at w = -1.
    """
    s, k = 2 * (angles / 2).sin(), (angles / 2).cos()
    above = (real.square() + imag.square()).unsqueeze(1) * k.square()[:, None] - s.square()[:, None]
    aside = -2 * real.unsqueeze(1) * (s * k)[:, None]
    size = above.square() + aside.square()
    inverse = torch.cat((above / size, -aside / size), dim=1)  # [C, 2 F, N/2]: real parts, then imaginary ones
    sums = (inverse @ residues.flatten(2)).reshape(len(step), 2, len(angles), 2, -1)
    plain, weighted = torch.complex(sums[:, 0], sums[:, 1]).unbind(2)  # [C, F, 2 R + 2] each
    e = torch.polar(torch.ones_like(angles), angles / 2)
    rational = step[..., None] * e[:, None] * (1j * s[:, None] * plain - k[:, None] * weighted)
    R = (rational.shape[-1] - 2) // 2
    cb, cp, pb, pp = rational[..., :R], rational[..., R : 2 * R], rational[..., 2 * R, None], rational[..., -1:]
    half = (e.conj() * k)[:, None]
    spectrum: Tensor = cb - cp * (half * pb) / (1 + half * pp)
    return spectrum.movedim(-1, 0)


def _exact(x: Tensor) -> Tensor:
    """Return a parameter in single precision at least."""
    return x.to(statistics_dtype(x.dtype))


def _read(weights: Tensor, rate: Tensor, length: int) -> Tensor:
    """Return ``Re sum_n weights[n] exp(l rate[n])`` for l < L, [..., C, L], of weights [..., C, N/2]."""
    rows, columns = _two_tables(rate, length)
    left = weights.unsqueeze(-2) * rows  # [..., C, rows, N/2]
    product = torch.cat((left.real, -left.imag), dim=-1) @ torch.cat((columns.real, columns.imag), dim=-1).mT
    return product.flatten(-2)[..., :length]


def _two_tables(rate: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return two tables of powers whose products are all up to a length, in little memory.

    ``exp(l rate)`` with ``l = a * width + b``: [C, rows, N/2] for a, and [C, width, N/2] for b.
    """
    width = math.isqrt(max(length - 1, 0)) + 1
    rows = torch.arange(-(-length // width), dtype=rate.real.dtype, device=rate.device) * width
    columns = torch.arange(width, dtype=rate.real.dtype, device=rate.device)
    return _powers(rate, rows), _powers(rate, columns)


def _powers(rate: Tensor, exponents: Tensor) -> Tensor:
    """Return ``exp(rate * exponent)``, [C, E, N/2]."""
    return (rate.unsqueeze(1) * exponents[:, None]).exp()


def _pairs(x: Tensor) -> Tensor:
    """Add to states [..., N/2] their conjugates: [..., N]."""
    return torch.cat((x, x.conj()), dim=-1)


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
    (``"s4"``) and `DiagonalKernel` (``"s4d"``). The cost is that of a Fourier transform. Steps and
    state matrices are named in `kernel_parameters`: they are trained with a small learning rate and without decay.

    Padding counts as zeros after the last real token, and tokens that a mask leaves between them are moved
    together, so a mask is a deletion. What comes out for padding is that of zeros: ``GLU(bias)``.

    Args:
        embed_dim: Width of the tokens, C; every feature is a channel.
        num_heads: Number of different state matrices; divides C. All channels of one have their own step and output.
        max_length: Longest sequence; needed by ``kernel="s4"``, the other has no limit.
        state_size: States per channel, counted with their conjugates; even.
        kernel: ``"s4"`` or ``"s4d"``.
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
        kernel: Literal["s4", "s4d"] = "s4",
        bidirectional: bool = True,
        step: tuple[float, float] = (1e-3, 1e-1),
        drop: float = 0.0,
        tied_drop: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        if kernel not in ("s4", "s4d"):
            raise ValueError(f"kernel={kernel!r} is not known; it takes 's4' or 's4d'.")
        if kernel == "s4" and (max_length is None or max_length < 1):
            raise ValueError(f"kernel='s4' needs max_length, the longest sequence, but it is {max_length}; set it.")
        if state_size < 2 or state_size % 2:
            raise ValueError(f"state_size={state_size} is not possible: states come in pairs; use an even number.")
        if not 0 < step[0] <= step[1]:
            raise ValueError(f"step={step} is not a range of positive numbers; use for example (0.001, 0.1).")
        self.embed_dim, self.num_heads, self.bidirectional = embed_dim, num_heads, bidirectional
        self.drop, self.tied_drop = drop, tied_drop
        sizes = (embed_dim, num_heads, state_size, 2 if bidirectional else 1)
        if kernel == "s4" and max_length is not None:
            self.kernel = LowRankKernel(*sizes, max_length=max_length, step=step, device=device, dtype=dtype)
        else:
            self.kernel = DiagonalKernel(*sizes, step=step, device=device, dtype=dtype)
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
        """Return the output [B, N, C] of the convolved tokens."""
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
    """S4D in one direction, which can continue a sequence from its states.

    .. code-block:: text

        h[n] = exp(step A) h[n-1] + (exp(step A) - 1) / A  x[n]          memory [C, state_size]
        y[n] = 2 Re(c h[n]) + d * x[n],   the rest as in `S4`

    A whole piece is convolved, and what the states before it leave in its tokens is added. Arguments are those of `S4`
    without `bidirectional`, `kernel` and `max_length`.

    Example:
        >>> import torch, tost
        >>> mixer = tost.nn.CausalS4D(64, 1, state_size=16)
        >>> _, state = mixer.forward_with_state(torch.randn(1, 100, 64))
        >>> state.memory.shape
        torch.Size([1, 64, 16])
    """

    accepts = Accepts(state=RecurrentState)
    kernel: DiagonalKernel

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        state_size: int = 64,
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
            kernel="s4d",
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
        check_memory(before.memory, x.shape[0], self.memory_shape())
        x = zero_padding(x, mask)
        count = num_tokens(x, mask)
        with _full_precision(x):
            states = before.memory.reshape(x.shape[0], self.embed_dim, -1, 2)
            u = real_last(x, mask).to(states.dtype).transpose(1, 2)
            memory = self.kernel.advance(states, u, count).to(states.dtype).flatten(2)
        carry.state = RecurrentState(memory, before.position + count)
        return self._project_out(real_first(partial(self._continue, states), x, mask), mask)

    def _continue(self, states: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the convolution of x [B, N, C] plus the contribution of the states [B, C, N/2, 2] before it."""
        with _full_precision(x):
            left = self.kernel.respond(states, x.shape[1]).transpose(1, 2)
        return (self._convolve(x, mask) + left).to(x.dtype)


def _full_precision(x: Tensor) -> torch.autocast:
    """Turn autocast off: Fourier transforms have no half precision, and products would bring it back."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)
