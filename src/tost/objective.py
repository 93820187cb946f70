"""The objective of the attention: coding rates, their variational form, and its gradient.

Axes: ``n`` tokens (the rows of `z`), ``d`` features, ``K`` groups, ``p`` columns of a basis. Leading dimensions are
batches and broadcast. With ``n_k = sum_n pi[n, k]``, the second moment of a group ``M_k = z^T diag(pi_k) z / n_k``, and
``F(M) = sum_i f(eigenvalue_i(M))``:

    R(z)              = 1/2 F(d/eps^2 * z^T z / n)                                   all tokens as one group
    R_c(z, pi)        = 1/2 sum_k n_k/n F(d/eps^2 * M_k)                             each group by itself
    R_c_var(z, pi, u) = 1/2 sum_k n_k/n sum_i f(d/eps^2 * (u_k^T M_k u_k)_ii)        only the diagonal, in the basis u_k
                        1/2 sum_k n_k/n sum_b F(d/eps^2 * (u_k^T M_k u_k)_bb)        or only the blocks of g columns

The scale stands outside `f`: the default ``f(x) = log(1 + x)`` yields ``log(1 + d/eps^2 x)``, the log-determinants of
maximal coding rate reduction, and ``eps = sqrt(d)`` the plain ``log(1 + x)`` of the attention operator. For orthonormal
`u_k` that span their group, ``R_c <= R_c_var``, an equality where `u_k` diagonalizes `M_k`. Blocks lie between the two:
the eigenvalues of the diagonal blocks of a matrix are majorized by its own, and those of smaller blocks by those of the
larger ones that hold them, so for a concave `f` merging blocks only lowers the sum. One block of all columns is `R_c`.

With ``centered=True`` the mean of each group is removed first: ``M_k`` becomes ``M_k - m_k m_k^T`` with the mean
``m_k = sum_n pi[n, k] z_n / n_k``, and ``R`` that of all tokens as one group. Everything above holds for these moments
as it does for any others, and rates only fall. What the mean adds to the gradient vanishes, since deviations from it
sum to zero: the step is the same with ``z_n - m_k`` in place of ``z_n``.

Half-precision inputs are computed, and their rates returned, in float32, also under autocast. Pass float64 where
``d/eps^2 * M`` exceeds 1e6: rounding blurs every eigenvalue by a fraction of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest

import torch
from torch import Tensor

from tost.ops._blocks import in_blocks
from tost.ops._checks import mask_hint

__all__ = [
    "EXP",
    "LOG",
    "RATIO",
    "SQRT",
    "Concave",
    "coding_rate",
    "compression_rate",
    "diagonal_bound",
    "rate_reduction",
    "spectral_sum",
    "tssa_step",
    "variational_compression",
    "variational_gradient",
]


@dataclass(frozen=True)
class Concave:
    """A concave, non-decreasing ``f`` on ``[0, inf)`` with ``f(0) = 0``, together with its derivative.

    Args:
        name: Name in messages and tables.
        value: Elementwise ``f``.
        derivative: Elementwise ``f'``.
        matrix_form: ``F(M)`` of a positive semi-definite ``[..., d, d]`` without its eigenvalues, where that is known.
        matrix_derivative: Likewise the gradient of ``F``: ``f'`` of the eigenvalues, with the eigenvectors of ``M``.

    Example:
        >>> power = Concave("power", lambda x: (1 + x) ** 0.25 - 1, lambda x: 0.25 * (1 + x) ** -0.75)
        >>> coding_rate(torch.eye(3), 1.0, f=power)
        tensor(0.2838)
    """

    name: str
    value: Callable[[Tensor], Tensor] = field(repr=False)
    derivative: Callable[[Tensor], Tensor] = field(repr=False)
    matrix_form: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    matrix_derivative: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)


def _eigenvalues(m: Tensor) -> Tensor:
    """Eigenvalues of a positive semi-definite matrix, never negative; NaN for a matrix that is not finite."""
    # The solver raises on one bad matrix; the rest of the batch should still be measured.
    finite = m.isfinite().all(-1).all(-1)[..., None]
    values: Tensor = torch.linalg.eigvalsh(m.masked_fill(~finite[..., None], 0))
    # Rounding makes zeros slightly negative. A plain clamp would also cut their derivative, f'(0), which pi needs.
    return (values + (values.clamp_min(0) - values).detach()).masked_fill(~finite, math.nan)


def _logdet_one_plus(m: Tensor) -> Tensor:
    """Return ``log det(I + m)`` for a positive semi-definite `m`."""
    factor, info = torch.linalg.cholesky_ex(m + torch.eye(m.shape[-1], dtype=m.dtype, device=m.device))
    if info.any():  # beside entries of 1e8, rounding swallows the identity in float32
        return _eigenvalues(m).log1p().sum(-1)
    return 2 * torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)


def _inverse_one_plus(m: Tensor) -> Tensor:
    return torch.linalg.inv(m + torch.eye(m.shape[-1], dtype=m.dtype, device=m.device))


LOG = Concave("log", torch.log1p, lambda x: 1 / (1 + x), _logdet_one_plus, _inverse_one_plus)
"""``log(1 + x)``: the coding rate itself, ``log det(I + M)``."""
SQRT = Concave("sqrt", lambda x: x / (1 + (1 + x).sqrt()), lambda x: 0.5 * (1 + x).rsqrt())
"""``sqrt(1 + x) - 1``."""
RATIO = Concave("ratio", lambda x: x / (1 + x), lambda x: (1 + x) ** -2)
"""``x / (1 + x)``, which is bounded."""
EXP = Concave("exp", lambda x: -torch.expm1(-x), lambda x: torch.exp(-x))
"""``1 - exp(-x)``, which is bounded."""


def spectral_sum(m: Tensor, f: Concave = LOG) -> Tensor:
    """Sum a function over the eigenvalues of a positive semi-definite matrix: ``F(M) = sum_i f(eigenvalue_i(M))``.

    Args:
        m: ``[..., d, d]``, symmetric positive semi-definite; only the lower triangle is read.
        f: The function; `LOG` gives ``log det(I + M)``.

    Returns:
        ``[...]``.

    Raises:
        ValueError: `m` is not a floating-point stack of square matrices.

    Example:
        >>> spectral_sum(torch.diag(torch.tensor([1.0, 3.0])), RATIO)
        tensor(1.2500)
    """
    _check_square(m)
    m = m.to(_compute_dtype(m))
    return f.value(_eigenvalues(m)).sum(-1) if f.matrix_form is None else f.matrix_form(m)


def diagonal_bound(m: Tensor, q: Tensor, f: Concave = LOG, *, block_size: int = 1) -> Tensor:
    """Bound `spectral_sum` from above by a diagonal, or by diagonal blocks: ``F(M) <= sum_b F((Q^T M Q)_bb)``.

    The bound needs orthonormal columns in `q` whose span contains the image of `m`. It is an equality if ``Q^T M Q`` is
    block diagonal, and for a strictly concave `f` only then. Blocks of one column are the diagonal, and blocks made of
    whole smaller blocks bound more tightly than these.

    Args:
        m: ``[..., d, d]``, symmetric positive semi-definite.
        q: ``[..., d, p]`` with ``p <= d``.
        f: The function; all four of this module are strictly concave.
        block_size: Consecutive columns in a block, g; divides p.

    Returns:
        ``[...]``.

    Raises:
        ValueError: `m` is not square, `q` does not fit it, or `block_size` does not divide its columns.

    Example:
        >>> m = torch.diag(torch.tensor([1.0, 3.0]))
        >>> rotation = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
        >>> spectral_sum(m), diagonal_bound(m, rotation)
        (tensor(2.0794), tensor(2.1885))
    """
    _check_square(m)
    d = m.shape[-1]
    if q.ndim < 2 or q.shape[-2] != d or q.shape[-1] > d:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and m has shape {tuple(m.shape)}; the bound needs q as [..., {d}, p] with "
            f"p <= {d}. Pass the basis vectors as the columns of q."
        )
    _check_blocks(q, block_size)
    dtype = _compute_dtype(m, q)
    m, q = m.to(dtype), q.to(dtype)
    with torch.autocast(m.device.type, enabled=False):
        if block_size == 1:
            return f.value((q * (m @ q)).sum(-2)).sum(-1)
        left, right = _blocks(q, block_size), _blocks(m @ q, block_size)
        return spectral_sum(left.mT @ right, f).sum(-1)


def coding_rate(
    z: Tensor, eps: float, *, f: Concave = LOG, mask: Tensor | None = None, centered: bool = False
) -> Tensor:
    """Measure the volume of all tokens: ``R(z) = 1/2 log det(I + d/(n eps^2) z^T z)``.

    Args:
        z: Tokens ``[..., n, d]``.
        eps: Precision to which tokens are coded, positive; ``sqrt(d)`` gives ``1/2 log det(I + z^T z / n)``.
        f: Replaces ``log(1 + x)``.
        mask: ``[..., n]`` bool; False leaves a token out, exactly as if it were not in `z`.
        centered: Take the second moments of a group about its mean.

    Returns:
        ``[...]``; 0 where no token is left.

    Raises:
        ValueError: A shape, a dtype or `eps` does not fit.

    Example:
        >>> coding_rate(torch.eye(3), eps=1.0)  # three directions, 1/2 log 2 each
        tensor(1.0397)
    """
    return compression_rate(z, z.new_ones(*z.shape[:-1], 1), eps, f=f, mask=mask, centered=centered)


def compression_rate(
    z: Tensor, pi: Tensor, eps: float, *, f: Concave = LOG, mask: Tensor | None = None, centered: bool = False
) -> Tensor:
    """Measure the volumes of the groups: ``R_c = 1/2 sum_k n_k/n log det(I + d/(n_k eps^2) z^T diag(pi_k) z)``.

    Args:
        z: Tokens ``[..., n, d]``.
        pi: Memberships ``[..., n, K]``, not negative; soft or one-hot, of any real dtype.
        eps: Precision to which tokens are coded, positive.
        f: Replaces ``log(1 + x)``.
        mask: ``[..., n]`` bool; False leaves a token out, exactly as if it were in neither `z` nor `pi`.
        centered: Take the second moments of a group about its mean.

    Returns:
        ``[...]``. A group without tokens adds 0 and receives no gradient.

    Raises:
        ValueError: A shape, a dtype or `eps` does not fit.

    Example:
        >>> compression_rate(torch.eye(4), torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]), eps=1.0)
        tensor(1.0986)
    """
    _check(z, pi, eps, mask)
    scale = z.shape[-1] / eps**2
    z, weight, share = _groups(z, pi, mask, _compute_dtype(z, pi))
    return 0.5 * (share * spectral_sum(scale * _second_moments(z, weight, centered), f)).sum(-1)


def rate_reduction(
    z: Tensor, pi: Tensor, eps: float, *, f: Concave = LOG, mask: Tensor | None = None, centered: bool = False
) -> Tensor:
    """Return ``R(z) - R_c(z, pi)``, the gain from coding by group; not negative if the rows of `pi` sum to one.

    Args:
        z: Tokens ``[..., n, d]``.
        pi: Memberships ``[..., n, K]``.
        eps: Precision to which tokens are coded, positive.
        f: Replaces ``log(1 + x)``.
        mask: ``[..., n]`` bool; False leaves a token out.
        centered: Take the second moments of a group about its mean.

    Returns:
        ``[...]``.

    Raises:
        ValueError: A shape, a dtype or `eps` does not fit.

    Example:
        >>> rate_reduction(torch.eye(4), torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]), eps=1.0)
        tensor(0.2877)
    """
    return coding_rate(z, eps, f=f, mask=mask, centered=centered) - compression_rate(
        z, pi, eps, f=f, mask=mask, centered=centered
    )


def variational_compression(
    z: Tensor,
    pi: Tensor,
    u: Tensor,
    eps: float,
    *,
    f: Concave = LOG,
    mask: Tensor | None = None,
    block_size: int = 1,
    centered: bool = False,
) -> Tensor:
    """Evaluate ``R_c_var = 1/2 sum_k n_k/n sum_i f(d/eps^2 * sum_n pi[n, k] (u_k^T z_n)_i^2 / n_k)``.

    Bounds `compression_rate` from above if the `u_k` are orthonormal and span their group; its cost is linear in ``n``.
    With blocks the inner sum is ``sum_b F(d/eps^2 * sum_n pi[n, k] (u_k^T z_n)_b (u_k^T z_n)_b^T / n_k)``.

    Args:
        z: Tokens ``[..., n, d]``.
        pi: Memberships ``[..., n, K]``, not negative.
        u: Bases ``[..., K, d, p]`` with ``p <= d``; only the bound needs them orthonormal.
        eps: Precision to which tokens are coded, positive; ``sqrt(d)`` gives ``log(1 + x)``, the operator's form.
        f: Replaces ``log(1 + x)``.
        mask: ``[..., n]`` bool; False leaves a token out.
        block_size: Consecutive columns of `u` in a block, g; divides p. More is tighter: ``g = p`` is the rate of the
            projected groups itself.
        centered: Take the second moments of a group about its mean.

    Returns:
        ``[...]``. A group without tokens adds 0 and receives no gradient.

    Raises:
        ValueError: A shape, a dtype, `eps` or `block_size` does not fit.

    Example:
        >>> pi = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]])
        >>> variational_compression(torch.eye(4), pi, torch.eye(4).expand(2, 4, 4), eps=1.0)  # tight: already diagonal
        tensor(1.0986)
    """
    _check(z, pi, eps, mask, u)
    _check_blocks(u, block_size)
    scale, dtype = z.shape[-1] / eps**2, _compute_dtype(z, pi, u)
    z, weight, share = _groups(z, pi, mask, dtype)
    w, moment = _project(z, weight, u.to(dtype), centered)
    if block_size == 1:
        return 0.5 * (share * f.value(scale * moment).sum(-1)).sum(-1)
    return 0.5 * (share * spectral_sum(scale * _block_moments(w, weight, block_size), f).sum(-1)).sum(-1)


def variational_gradient(
    z: Tensor,
    pi: Tensor,
    u: Tensor,
    eps: float,
    *,
    f: Concave = LOG,
    mask: Tensor | None = None,
    block_size: int = 1,
    centered: bool = False,
) -> Tensor:
    """Differentiate `variational_compression` with respect to `z`, `pi` held fixed, in closed form.

    ``gradient[n] = 1/n sum_k pi[n, k] u_k diag(D_k) u_k^T z_n`` with ``D_k = d/eps^2 f'(d/eps^2 * moment_k)`` and
    ``moment_k = sum_n pi[n, k] (u_k^T z_n)^2 / n_k``. With blocks ``D_k`` is block diagonal, ``f'`` of the blocks of
    moments. Equal to what autograd returns, and itself differentiable.

    Arguments are those of `variational_compression`; where `mask` leaves a token out, its gradient is 0.

    Returns:
        ``[..., n, d]``, in the dtype of `z`.

    Raises:
        ValueError: A shape, a dtype or `eps` does not fit.

    Example:
        >>> variational_gradient(torch.eye(2), torch.ones(2, 1), torch.eye(2)[None], eps=2**0.5)
        tensor([[0.3333, 0.0000],
                [0.0000, 0.3333]])
    """
    _check(z, pi, eps, mask, u)
    _check_blocks(u, block_size)
    scale, dtype, out_dtype = z.shape[-1] / eps**2, _compute_dtype(z, pi, u), z.dtype
    z, weight, share = _groups(z, pi, mask, dtype)
    u = u.to(dtype)
    w, moment = _project(z, weight, u, centered)
    pi_over_n = (share[..., None] * weight.mT)[..., None]  # [..., K, n, 1]
    with torch.autocast(z.device.type, enabled=False):
        if block_size == 1:
            damping = scale * f.derivative(scale * moment)
            damped = pi_over_n * damping[..., None, :] * w
        else:
            damping = scale * _matrix_derivative(scale * _block_moments(w, weight, block_size), f)
            damped = pi_over_n * (_blocks(w, block_size) @ damping).movedim(-3, -2).flatten(-2)
        return (damped @ u.mT).sum(-3).to(out_dtype)


def tssa_step(
    z: Tensor,
    pi: Tensor,
    u: Tensor,
    eps: float,
    tau: float,
    *,
    f: Concave = LOG,
    mask: Tensor | None = None,
    block_size: int = 1,
    centered: bool = False,
) -> Tensor:
    """Return ``-tau * variational_gradient``, the update that token statistics self-attention adds to `z`.

    ``eps = sqrt(d)`` and ``tau = n`` give the operator, ``-sum_k pi[n, k] u_k (u_k^T z_n / (1 + moment_k))``. For
    orthonormal `u_k` and rows of `pi` that sum to one, every ``0 < tau <= n eps^2 / (d f'(0))`` lowers
    `variational_compression` by at least ``tau/2 * |gradient|^2``: as `f` is concave, the objective lies below a
    quadratic of curvature ``d f'(0) / (n eps^2)``, for blocks of any size.

    Args:
        z: Tokens ``[..., n, d]``.
        pi: Memberships ``[..., n, K]``, not negative.
        u: Bases ``[..., K, d, p]`` with ``p <= d``.
        eps: Precision to which tokens are coded, positive.
        tau: Step size.
        f: Replaces ``log(1 + x)``.
        mask: ``[..., n]`` bool; False leaves a token out, and its update is 0.
        block_size: Consecutive columns of `u` in a block, g; divides p.
        centered: Take the second moments of a group about its mean.

    Returns:
        ``[..., n, d]``, in the dtype of `z`, to be added to `z`.

    Raises:
        ValueError: A shape, a dtype or `eps` does not fit.

    Example:
        >>> z = torch.eye(2)
        >>> z + tssa_step(z, torch.ones(2, 1), torch.eye(2)[None], eps=2**0.5, tau=1.5)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """
    return -tau * variational_gradient(z, pi, u, eps, f=f, mask=mask, block_size=block_size, centered=centered)


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the widest dtype among the tensors, float32 at least."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _groups(z: Tensor, pi: Tensor, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens, each group's weights ``pi / n_k`` [..., n, K], and its share ``n_k / n`` of them [..., K]."""
    z, pi = z.to(dtype), pi.to(dtype)
    num_tokens: Tensor | int = z.shape[-2]
    if mask is not None:
        # Filling, unlike multiplying, also leaves out a NaN in the padding.
        z, pi = z.masked_fill(~mask[..., None], 0), pi.masked_fill(~mask[..., None], 0)
        num_tokens = mask.sum(-1, keepdim=True).clamp_min(1)
    n_k = pi.sum(-2)
    return z, pi / n_k.where(n_k > 0, 1)[..., None, :], n_k / num_tokens


def _second_moments(z: Tensor, weight: Tensor, centered: bool) -> Tensor:
    """Return ``z^T diag(weight_k) z`` for every group, or the n x n matrix of the same spectrum if that is smaller."""
    z, weight = z[..., None, :, :], weight.mT[..., None]  # [..., 1, n, d] and [..., K, n, 1]
    if centered:
        z = z - (weight * z).sum(-2, keepdim=True)
    with torch.autocast(z.device.type, enabled=False):
        # The n x n form needs the square root of pi, whose derivative at 0 is infinite: only for a constant pi.
        if z.shape[-2] < z.shape[-1] and not weight.requires_grad:
            return weight.sqrt() * (z @ z.mT) * weight.sqrt().mT
        return (weight * z).mT @ z


def _project(z: Tensor, weight: Tensor, u: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """Return ``w = u_k^T z_n`` [..., K, n, p], less its mean if centered, and its second moment in each group."""
    with torch.autocast(z.device.type, enabled=False):
        w = z[..., None, :, :] @ u
    if centered:
        w = w - (weight.mT[..., None] * w).sum(-2, keepdim=True)
    return w, (weight.mT[..., None] * w.square()).sum(-2)


def _blocks(w: Tensor, block_size: int) -> Tensor:
    """Return w [..., n, p] with its columns in blocks, [..., p / g, n, g]."""
    return in_blocks(w, block_size).movedim(-2, -3)


def _block_moments(w: Tensor, weight: Tensor, block_size: int) -> Tensor:
    """Return the second moments of w [..., K, n, p] in blocks of columns, [..., K, p / g, g, g]."""
    blocks = _blocks(w, block_size)
    with torch.autocast(w.device.type, enabled=False):
        return (weight.mT[..., None, :, None] * blocks).mT @ blocks


def _matrix_derivative(m: Tensor, f: Concave) -> Tensor:
    """Return the gradient of `spectral_sum`, [..., g, g]: `f'` of the eigenvalues, with the eigenvectors of m."""
    if f.matrix_derivative is not None:
        return f.matrix_derivative(m)
    values, vectors = torch.linalg.eigh(m)
    return (vectors * f.derivative(values.clamp_min(0))[..., None, :]) @ vectors.mT


def _check_blocks(basis: Tensor, block_size: int) -> None:
    if block_size < 1 or basis.shape[-1] % block_size != 0:
        raise ValueError(
            f"block_size is {block_size} and the basis has {basis.shape[-1]} columns; blocks hold a whole number of "
            "columns, at least 1, that divides them."
        )


def _check_square(m: Tensor) -> None:
    if m.ndim < 2 or m.shape[-1] != m.shape[-2] or not m.is_floating_point():
        raise ValueError(
            f"m has shape {tuple(m.shape)} and dtype {m.dtype}; a spectral sum needs floating-point square matrices "
            "[..., d, d]. Pass a second moment such as z.mT @ z / n."
        )


def _check(z: Tensor, pi: Tensor, eps: float, mask: Tensor | None, u: Tensor | None = None) -> None:
    if not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps}; the coding precision must be positive and finite. Use sqrt(d) or smaller.")
    if z.ndim < 2 or 0 in z.shape[-2:] or not z.is_floating_point():
        raise ValueError(
            f"z has shape {tuple(z.shape)} and dtype {z.dtype}; tokens must be floating point, [..., n, d] with at "
            "least one token and one feature. Put one token in each row."
        )
    n, d = z.shape[-2:]
    if pi.ndim < 2 or pi.shape[-2] != n:
        raise ValueError(
            f"pi has shape {tuple(pi.shape)} and z has shape {tuple(z.shape)}; memberships must be [..., {n}, K]. "
            "Put one token in each row and one group in each column."
        )
    if u is not None and (u.ndim < 3 or u.shape[-3:-1] != (pi.shape[-1], d) or u.shape[-1] > d):
        raise ValueError(
            f"u has shape {tuple(u.shape)} for z {tuple(z.shape)} and pi {tuple(pi.shape)}; bases must be "
            f"[..., {pi.shape[-1]}, {d}, p] with p <= {d}. Stack one matrix per group, basis vectors as columns."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.ndim < 1 or mask.shape[-1] != n):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; it must be bool, [..., {n}], one entry per "
            f"token of z, True for the tokens to keep. {'' if mask.dtype == torch.bool else mask_hint(mask)}"
        )
    batches = {"z": z.shape[:-2], "pi": pi.shape[:-2]} | ({} if mask is None else {"mask": mask.shape[:-1]})
    batches |= {} if u is None else {"u": u.shape[:-3]}
    if any(len({*sizes} - {1}) > 1 for sizes in zip_longest(*map(reversed, batches.values()), fillvalue=1)):
        given = ", ".join(f"{name} {tuple(shape)}" for name, shape in batches.items())
        raise ValueError(f"leading dimensions are {given}; they must broadcast. Expand or unsqueeze one of them.")
