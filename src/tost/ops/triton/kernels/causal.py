"""The kernels of the causal operator. What is in the module `common` holds here.

Shapes: w, y, dy, dw [rows, H, D], mask [rows], temperature [H], pi and what is per token and head [rows, H]; bias
[rows, H], or [N, H] where all sequences share it; sums at the start of each chunk, and gradients from later chunks,
[chunks, H, D], for the masses [chunks, H].
"""

import triton
import triton.language as tl

from tost.ops import _numerics
from tost.ops.triton.kernels import common

PREFIX_FLOOR = tl.constexpr(_numerics.PREFIX_FLOOR)


@triton.jit
def load_bias(bias, rows, first, inside, heads, H: tl.constexpr, BIAS_SHARED: tl.constexpr):
    """Return the bias of some rows and heads. BIAS_SHARED: it is the same for all sequences."""
    if BIAS_SHARED:
        rows = rows - first
    return tl.load(bias + rows * H + heads, inside, 0.0)


@triton.jit
def moments(x, p, weighted, mass, chunk, head, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return the sums of ``pi w^2`` up to every row, [CHUNK, DP], and those of pi with their floor, [CHUNK, 1]."""
    total = tl.cumsum(p[:, None] * (x * x), 0) + common.load_sum(weighted, chunk, head, H, D, DP)
    m = tl.cumsum(p, 0) + tl.load(mass + chunk * H + head)
    return total, m[:, None] + common.MASS_FLOOR


@triton.jit(do_not_specialize=["chunks", "N"])
def memberships(
    w, mask, temperature, bias, starts, pi, sums, masses, table, chunks, N, BIAS_SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the memberships of a chunk, and its sums of ``pi w^2`` and of pi."""
    chunk, _, first, begin, end = common.place(table, chunks, N, CHUNK)
    dtype: tl.constexpr = pi.dtype.element_ty
    h = tl.arange(0, HP)
    t = common.load_heads(temperature, H, HP)
    carry = common.load_sums(starts, chunk, H, D, HP, DP)
    total = tl.zeros([HP, DP], dtype)
    total_mass = tl.zeros([HP], dtype)
    for i in range(0, CHUNK, T):
        rows, real = common.rows_of(mask, begin + i, end, T)
        x = common.load_tile(w, rows, real, H, D, HP, DP, dtype)
        square = x * x
        prefix = tl.cumsum(square, 0) + carry[None, :, :]
        energy = tl.sum(square / tl.maximum(prefix, PREFIX_FLOOR), 2)
        if bias is not None:
            inside = (rows < end)[:, None] & (h < H)[None, :]
            energy = energy + D * load_bias(bias, rows[:, None], first, inside, h[None, :], H, BIAS_SHARED)
        p = tl.where(real[:, None], common.softmax(t[None, :] * energy, H, HP), 0.0)
        common.store_heads(pi, p, rows, end, H, HP)
        carry += tl.sum(square, 0)
        total += tl.sum(p[:, :, None] * square, 0)
        total_mass += tl.sum(p, 0)
    common.store_sums(sums, total, chunk, H, D, HP, DP)
    common.store_masses(masses, total_mass, chunk, H, HP)


@triton.jit(do_not_specialize=["chunks", "N"])
def output(
    w, mask, pi, weighted, mass, y, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write y for a chunk and a head."""
    chunk, _, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x = common.load_head(w, rows, head, real, H, D, DP, pi.dtype.element_ty)
    p = tl.load(pi + rows * H + head, real, 0.0)
    total, m = moments(x, p, weighted, mass, chunk, head, H, D, DP)
    common.store_head(y, -p[:, None] * x * (m / (m + total)), rows, head, end, H, D, DP)


@triton.jit
def step(
    w, mask, temperature, bias, squares, weighted, mass, y, squares_after, weighted_after, mass_after,
    BIAS_SHARED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Advance a sequence by one token: y and the sums after it. The sums before are zero if `squares` is None."""
    sequence = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = squares_after.dtype.element_ty
    own, inside = common.sum_lanes(sequence, H, D, HP, DP)
    h = tl.arange(0, HP)
    real = h < H
    if mask is not None:
        real = real & (tl.load(mask + sequence + h * 0, real, 0) != 0)
    x = tl.load(w + own, inside & real[:, None], 0.0).to(dtype)
    square = x * x
    c, total, m = square, tl.zeros([HP, DP], dtype), tl.zeros([HP], dtype)
    if squares is not None:
        c = tl.load(squares + own, inside, 0.0) + square
        total = tl.load(weighted + own, inside, 0.0)
        m = tl.load(mass + sequence * H + h, h < H, 0.0)
    energy = tl.sum(square / tl.maximum(c, PREFIX_FLOOR), 1)
    if bias is not None:
        energy = energy + D * load_bias(bias, sequence, sequence, h < H, h, H, BIAS_SHARED)
    logit = common.load_heads(temperature, H, HP) * energy
    p = tl.where(real, tl.sum(common.softmax(logit[None, :], H, HP), 0), 0.0)
    total += p[:, None] * square
    m += p
    floored = (m + common.MASS_FLOOR)[:, None]
    tl.store(y + own, (-p[:, None] * x * (floored / (floored + total))).to(y.dtype.element_ty), inside)
    tl.store(squares_after + own, c, inside)
    tl.store(weighted_after + own, total, inside)
    common.store_masses(mass_after, m, sequence, H, HP)


@triton.jit
def replay(w, dy, pi, weighted, mass, chunk, head, rows, real, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return w, dy [CHUNK, DP], pi [CHUNK], the gain and the direct gradients of the sums of ``pi w^2`` and of pi."""
    x, o, p = common.load_token_gradients(w, dy, pi, rows, head, real, H, D, DP)
    total, m = moments(x, p, weighted, mass, chunk, head, H, D, DP)
    gain = m / (m + total)
    direct = gain * gain * p[:, None] * o * x / m
    return x, o, p, gain, direct, -tl.sum(direct * total / m, 1)


@triton.jit(do_not_specialize=["chunks", "N"])
def products(
    w, dy, mask, pi, weighted, mass, sums, masses, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk what the outputs of one head hand to the sums of ``pi w^2`` and of pi."""
    chunk, _, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    _, _, _, _, direct, to_mass = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, H, D, DP)
    common.store_sum(sums, tl.sum(direct, 0), chunk, head, H, D, DP)
    tl.store(masses + chunk * H + head, tl.sum(to_mass, 0))


@triton.jit(do_not_specialize=["chunks", "N"])
def d_memberships(
    w, dy, mask, pi, weighted, mass, later_weighted, later_mass, d_pi, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the memberships for a chunk and a head."""
    chunk, _, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x, o, _, gain, direct, to_mass = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, H, D, DP)
    bar = tl.cumsum(direct, 0, reverse=True) + common.load_sum(later_weighted, chunk, head, H, D, DP)
    bar_mass = tl.cumsum(to_mass, 0, reverse=True) + tl.load(later_mass + chunk * H + head)
    value = tl.sum(x * (x * bar - o * gain), 1) + bar_mass
    tl.store(d_pi + rows * H + head, value, rows < end)


@triton.jit(do_not_specialize=["rows"])
def d_logits(pi, d_pi, d_logit, rows, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient of the logits. Rows of padding become 0 with their memberships."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = tl.arange(0, HP)
    at, inside = n[:, None] * H + h[None, :], (n < rows)[:, None] & (h < H)[None, :]
    p, d = tl.load(pi + at, inside, 0.0), tl.load(d_pi + at, inside, 0.0)
    tl.store(d_logit + at, p * (d - tl.sum(p * d, 1)[:, None]), inside)


@triton.jit
def through_shares(x, d_share, squares, chunk, head, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return ``1 / c`` and the direct gradients of c, [CHUNK, DP], from those of the shares, [CHUNK]."""
    square = x * x
    total = tl.cumsum(square, 0) + common.load_sum(squares, chunk, head, H, D, DP)
    inverse = 1.0 / tl.maximum(total, PREFIX_FLOOR)
    direct = -d_share[:, None] * (square * inverse) * inverse
    return inverse, tl.where(total > PREFIX_FLOOR, direct, 0.0)


@triton.jit(do_not_specialize=["chunks", "N"])
def shares(
    w, mask, temperature, bias, squares, d_logit, sums, d_temperature, table, chunks, N,
    BIAS_SHARED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk what its shares hand to the sums of ``w^2``, and the gradient of the temperature."""
    chunk, _, first, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x = common.load_head(w, rows, head, real, H, D, DP, d_logit.dtype.element_ty)
    dl = tl.load(d_logit + rows * H + head, real, 0.0)
    inverse, direct = through_shares(x, tl.load(temperature + head) * dl, squares, chunk, head, H, D, DP)
    energy = tl.sum(x * x * inverse, 1)
    if bias is not None:
        energy = energy + D * load_bias(bias, rows, first, real, head, H, BIAS_SHARED)
    tl.store(d_temperature + chunk * H + head, tl.sum(dl * energy, 0))
    common.store_sum(sums, tl.sum(direct, 0), chunk, head, H, D, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def gradient(
    w, dy, mask, temperature, pi, weighted, mass, squares, d_logit, later_squares, later_weighted, dw,
    table, chunks, N, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write dw for a chunk and a head."""
    chunk, _, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x, o, p, gain, direct, _ = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, H, D, DP)
    bar = tl.cumsum(direct, 0, reverse=True) + common.load_sum(later_weighted, chunk, head, H, D, DP)
    value = 2.0 * x * p[:, None] * bar - p[:, None] * o * gain
    d_share = tl.load(temperature + head) * tl.load(d_logit + rows * H + head, real, 0.0)
    inverse, direct = through_shares(x, d_share, squares, chunk, head, H, D, DP)
    bar = tl.cumsum(direct, 0, reverse=True) + common.load_sum(later_squares, chunk, head, H, D, DP)
    value += 2.0 * x * (d_share[:, None] * inverse + bar)
    common.store_head(dw, value, rows, head, end, H, D, DP)
