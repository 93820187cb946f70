"""The kernels of the operator that is not causal. What is in the module `common` holds here.

Shapes: w, y, dy, dw [rows, H, D], mask [rows], temperature [H], count [sequences], pi, d_energy [rows, H]; sums of
chunks [chunks, H, D], their masses [chunks, H]; those of sequences [sequences, H, D] and [sequences, H].
"""

import triton
import triton.language as tl

from tost.ops import _numerics
from tost.ops.triton.kernels.common import (
    load_head,
    load_sum,
    load_sums,
    load_tile,
    load_token_gradients,
    place,
    rows_of,
    rows_of_head,
    softmax,
    store_head,
    store_heads,
    store_sum,
    store_sums,
    store_tile,
)

SQUARE_FLOOR = tl.constexpr(_numerics.SQUARE_FLOOR)
MASS_FLOOR = tl.constexpr(_numerics.MASS_FLOOR)


@triton.jit
def multiplier(temperature, count, sequence, H: tl.constexpr, HP: tl.constexpr):
    """Return what the share of a head is multiplied by to give a logit, [HP]."""
    h = tl.arange(0, HP)
    factor = tl.load(temperature + h, h < H, 0.0)
    if count is not None:
        factor = factor * tl.load(count + sequence)
    return factor


@triton.jit
def memberships(square, inverse, factor, real, H: tl.constexpr, HP: tl.constexpr):
    """Return pi of a tile, [T, HP], 0 for padding and for heads that do not exist."""
    heads = (tl.arange(0, HP) < H)[None, :]
    if inverse is not None:
        square = square * inverse[None, :, :]
    p = softmax(factor[None, :] * tl.sum(square, 2), heads)
    return tl.where(real[:, None] & heads, p, 0.0)


@triton.jit
def weigh(w, mask, pi, inverse, factor, begin, end, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr,
          DP: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Write pi of a tile; return it, [T, HP], and the squares of the tokens, [T, HP, DP]."""
    rows, real = rows_of(mask, begin, end, T)
    x = load_tile(w, rows, real, H, D, HP, DP, pi.dtype.element_ty)
    p = memberships(x * x, inverse, factor, real, H, HP)
    store_heads(pi, p, rows, end, H, HP)
    return p, x * x


@triton.jit
def load_gain(weighted, mass, sequence, head, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return the mass of a head, with its floor, and ``1 / (1 + moment)``, [DP]."""
    m = tl.load(mass + sequence * H + head) + MASS_FLOOR
    return m, m / (m + load_sum(weighted, sequence, head, H, D, DP))


@triton.jit(do_not_specialize=["chunks", "N"])
def moments(
    w, mask, temperature, squares, count, pi, sums, masses, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the memberships of a chunk, and its sums of ``pi w^2`` and of pi. `squares` is None if not normalized."""
    chunk, sequence, _, begin, end = place(table, chunks, N, CHUNK)
    dtype: tl.constexpr = sums.dtype.element_ty
    h = tl.arange(0, HP)
    factor = multiplier(temperature, count, sequence, H, HP)
    inverse = None
    if squares is not None:
        inverse = 1.0 / tl.maximum(load_sums(squares, sequence, H, D, HP, DP), SQUARE_FLOOR)
    total = tl.zeros([T, HP, DP], dtype)
    total_mass = tl.zeros([T, HP], dtype)
    for i in range(0, CHUNK, T):
        p, square = weigh(w, mask, pi, inverse, factor, begin + i, end, H, D, HP, DP, T)
        total += p[:, :, None] * square
        total_mass += p
    store_sums(sums, tl.sum(total, 0), chunk, H, D, HP, DP)
    tl.store(masses + chunk * H + h, tl.sum(total_mass, 0), h < H)


@triton.jit(do_not_specialize=["chunks", "N"])
def output(
    w, mask, pi, weighted, mass, y, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write y for a chunk and a head."""
    _, sequence, _, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    x = load_head(w, rows, head, real, H, D, DP, pi.dtype.element_ty)
    p = tl.load(pi + rows * H + head, real, 0.0)
    _, gain = load_gain(weighted, mass, sequence, head, H, D, DP)
    store_head(y, -p[:, None] * x * gain[None, :], rows, head, end, H, D, DP)


@triton.jit(do_not_specialize=["N"])
def whole(
    w, mask, temperature, count, y, pi, squares, weighted, mass, N,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Run the operator on a short sequence in one program, which reads its tokens three times."""
    sequence = tl.program_id(0).to(tl.int64)
    begin = sequence * N
    end = begin + N
    dtype: tl.constexpr = pi.dtype.element_ty
    h = tl.arange(0, HP)
    factor = multiplier(temperature, count, sequence, H, HP)
    inverse = None
    if NORMALIZE:
        total = tl.zeros([T, HP, DP], dtype)
        for i in range(0, N, T):
            rows, real = rows_of(mask, begin + i, end, T)
            x = load_tile(w, rows, real, H, D, HP, DP, dtype)
            total += x * x
        summed = tl.sum(total, 0)
        store_sums(squares, summed, sequence, H, D, HP, DP)
        inverse = 1.0 / tl.maximum(summed, SQUARE_FLOOR)
    total = tl.zeros([T, HP, DP], dtype)
    total_mass = tl.zeros([T, HP], dtype)
    for i in range(0, N, T):
        p, square = weigh(w, mask, pi, inverse, factor, begin + i, end, H, D, HP, DP, T)
        total += p[:, :, None] * square
        total_mass += p
    weights, masses = tl.sum(total, 0), tl.sum(total_mass, 0)
    store_sums(weighted, weights, sequence, H, D, HP, DP)
    tl.store(mass + sequence * H + h, masses, h < H)
    m = (masses + MASS_FLOOR)[:, None]
    gain = m / (m + weights)
    for i in range(0, N, T):
        rows, real = rows_of(mask, begin + i, end, T)
        x = load_tile(w, rows, real, H, D, HP, DP, dtype)
        p = memberships(x * x, inverse, factor, real, H, HP)
        store_tile(y, -p[:, :, None] * x * gain[None, :, :], rows, end, H, D, HP, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def products(
    w, dy, mask, pi, sums, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum ``dy pi w`` over a chunk, for one head."""
    chunk, _, _, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    x, o, p = load_token_gradients(w, dy, pi, rows, head, real, H, D, DP)
    store_sum(sums, tl.sum(p[:, None] * o * x, 0), chunk, head, H, D, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def energies(
    w, dy, mask, temperature, count, pi, squares, weighted, mass, product, d_energy, sums, d_temperature,
    table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each share, sums of ``w^2`` times it over the chunk, and the temperature's, [chunks, H]."""
    chunk, sequence, _, begin, end = place(table, chunks, N, CHUNK)
    dtype: tl.constexpr = pi.dtype.element_ty
    h = tl.arange(0, HP)
    factor = multiplier(temperature, count, sequence, H, HP)
    m = tl.load(mass + sequence * H + h, h < H, 1.0)[:, None] + MASS_FLOOR
    moment = load_sums(weighted, sequence, H, D, HP, DP) / m
    gain = 1.0 / (1.0 + moment)
    d_weighted = gain * gain * load_sums(product, sequence, H, D, HP, DP) / m
    d_mass = -tl.sum(d_weighted * moment, 1)
    if squares is not None:
        inverse = 1.0 / tl.maximum(load_sums(squares, sequence, H, D, HP, DP), SQUARE_FLOOR)
    total = tl.zeros([T, HP, DP], dtype)
    total_temperature = tl.zeros([T, HP], dtype)
    for i in range(0, CHUNK, T):
        rows, real = rows_of(mask, begin + i, end, T)
        x = load_tile(w, rows, real, H, D, HP, DP, dtype)
        o = load_tile(dy, rows, real, H, D, HP, DP, dtype)
        p = tl.load(pi + rows[:, None] * H + h[None, :], real[:, None] & (h < H)[None, :], 0.0)
        d_pi = tl.sum(x * (x * d_weighted[None, :, :] - o * gain[None, :, :]), 2) + d_mass[None, :]
        d_logit = p * (d_pi - tl.sum(p * d_pi, 1)[:, None])
        d_share = factor[None, :] * d_logit
        store_heads(d_energy, d_share, rows, end, H, HP)
        square = x * x
        if squares is None:
            share = tl.sum(square, 2)
        else:
            share = tl.sum(square * inverse[None, :, :], 2)
            total += square * d_share[:, :, None]
        total_temperature += d_logit * share
    by_temperature = tl.sum(total_temperature, 0)
    if count is not None:
        by_temperature = by_temperature * tl.load(count + sequence)
    tl.store(d_temperature + chunk * H + h, by_temperature, h < H)
    if squares is not None:
        store_sums(sums, tl.sum(total, 0), chunk, H, D, HP, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def gradient(
    w, dy, mask, pi, squares, weighted, mass, product, d_energy, reach, dw, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write dw for a chunk and a head; `reach` is the sum of ``w^2`` times the gradient of each share."""
    _, sequence, _, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    x, o, p = load_token_gradients(w, dy, pi, rows, head, real, H, D, DP)
    d_share = tl.load(d_energy + rows * H + head, real, 0.0)
    m, gain = load_gain(weighted, mass, sequence, head, H, D, DP)
    d_weighted = gain * gain * load_sum(product, sequence, head, H, D, DP) / m
    through = p[:, None] * d_weighted[None, :]
    if squares is None:
        through += d_share[:, None]
    else:
        total = load_sum(squares, sequence, head, H, D, DP)
        inverse = 1.0 / tl.maximum(total, SQUARE_FLOOR)
        # Multiplied one by one: the square of the inverse may leave float32.
        d_squares = -inverse * (inverse * load_sum(reach, sequence, head, H, D, DP))
        d_squares = tl.where(total > SQUARE_FLOOR, d_squares, 0.0)
        through += d_share[:, None] * inverse[None, :] + d_squares[None, :]
    store_head(dw, 2.0 * x * through - p[:, None] * o * gain[None, :], rows, head, end, H, D, DP)
