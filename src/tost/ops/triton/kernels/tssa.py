"""The kernels of the operator that is not causal. What is in the module `common` holds here.

Shapes: w, y, dy, dw [rows, H, D], mask [rows], temperature [H], pi, d_energy [rows, H]; sums of
chunks [chunks, H, D], their masses [chunks, H]; those of sequences [sequences, H, D] and [sequences, H].
"""

import triton
import triton.language as tl

from tost.ops import _numerics
from tost.ops.triton.kernels import common

SQUARE_FLOOR = tl.constexpr(_numerics.SQUARE_FLOOR)


@triton.jit
def load_inverse(squares, sequence, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Return 1 over the sums of squares, with their floor, [HP, DP]; None if there are none: not normalized."""
    inverse = None
    if squares is not None:
        inverse = 1.0 / tl.maximum(common.load_sums(squares, sequence, H, D, HP, DP), SQUARE_FLOOR)
    return inverse


@triton.jit
def shares(square, inverse):
    """Return the share of each token and head, [T, HP], from the squares [T, HP, DP]."""
    if inverse is not None:
        square = square * inverse[None, :, :]
    return tl.sum(square, 2)


@triton.jit
def memberships(square, inverse, t, real, H: tl.constexpr, HP: tl.constexpr):
    """Return pi of a tile, [T, HP], 0 for padding and for heads that do not exist."""
    return tl.where(real[:, None], common.softmax(t[None, :] * shares(square, inverse), H, HP), 0.0)


@triton.jit
def weigh(w, mask, pi, inverse, t, begin, end, length, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr,
          DP: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Write pi of `length` rows; return their sums of ``pi w^2``, [HP, DP], and of pi, [HP]."""
    dtype: tl.constexpr = pi.dtype.element_ty
    total = tl.zeros([T, HP, DP], dtype)
    mass = tl.zeros([T, HP], dtype)
    for i in range(0, length, T):
        rows, real = common.rows_of(mask, begin + i, end, T)
        x = common.load_tile(w, rows, real, H, D, HP, DP, dtype)
        p = memberships(x * x, inverse, t, real, H, HP)
        common.store_heads(pi, p, rows, end, H, HP)
        total += p[:, :, None] * (x * x)
        mass += p
    return tl.sum(total, 0), tl.sum(mass, 0)


@triton.jit
def load_gain(weighted, mass, sequence, head, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return the mass of a head, with its floor, and ``1 / (1 + moment)``, [DP]."""
    m = tl.load(mass + sequence * H + head) + common.MASS_FLOOR
    return m, m / (m + common.load_sum(weighted, sequence, head, H, D, DP))


@triton.jit(do_not_specialize=["chunks", "N"])
def moments(
    w, mask, temperature, squares, pi, sums, masses, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the memberships of a chunk, and its sums of ``pi w^2`` and of pi. `squares` is None if not normalized."""
    chunk, sequence, _, begin, end = common.place(table, chunks, N, CHUNK)
    t = common.load_heads(temperature, H, HP)
    inverse = load_inverse(squares, sequence, H, D, HP, DP)
    total, mass = weigh(w, mask, pi, inverse, t, begin, end, CHUNK, H, D, HP, DP, T)
    common.store_sums(sums, total, chunk, H, D, HP, DP)
    common.store_masses(masses, mass, chunk, H, HP)


@triton.jit(do_not_specialize=["chunks", "N"])
def output(
    w, mask, pi, weighted, mass, y, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write y for a chunk and a head."""
    _, sequence, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x = common.load_head(w, rows, head, real, H, D, DP, pi.dtype.element_ty)
    p = tl.load(pi + rows * H + head, real, 0.0)
    _, gain = load_gain(weighted, mass, sequence, head, H, D, DP)
    common.store_head(y, -p[:, None] * x * gain[None, :], rows, head, end, H, D, DP)


@triton.jit(do_not_specialize=["N"])
def whole(
    w, mask, temperature, y, pi, squares, weighted, mass, N,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Run the operator on a short sequence in one program, which reads its tokens three times."""
    sequence = tl.program_id(0).to(tl.int64)
    begin = sequence * N
    end = begin + N
    dtype: tl.constexpr = pi.dtype.element_ty
    t = common.load_heads(temperature, H, HP)
    inverse = None
    if NORMALIZE:
        total = tl.zeros([T, HP, DP], dtype)
        for i in range(0, N, T):
            rows, real = common.rows_of(mask, begin + i, end, T)
            x = common.load_tile(w, rows, real, H, D, HP, DP, dtype)
            total += x * x
        summed = tl.sum(total, 0)
        common.store_sums(squares, summed, sequence, H, D, HP, DP)
        inverse = 1.0 / tl.maximum(summed, SQUARE_FLOOR)
    weights, masses = weigh(w, mask, pi, inverse, t, begin, end, N, H, D, HP, DP, T)
    common.store_sums(weighted, weights, sequence, H, D, HP, DP)
    common.store_masses(mass, masses, sequence, H, HP)
    m = (masses + common.MASS_FLOOR)[:, None]
    gain = m / (m + weights)
    for i in range(0, N, T):
        rows, real = common.rows_of(mask, begin + i, end, T)
        x = common.load_tile(w, rows, real, H, D, HP, DP, dtype)
        p = memberships(x * x, inverse, t, real, H, HP)
        common.store_tile(y, -p[:, :, None] * x * gain[None, :, :], rows, end, H, D, HP, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def products(
    w, dy, mask, pi, sums, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum ``dy pi w`` over a chunk, for one head."""
    chunk, _, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x, o, p = common.load_token_gradients(w, dy, pi, rows, head, real, H, D, DP)
    common.store_sum(sums, tl.sum(p[:, None] * o * x, 0), chunk, head, H, D, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def energies(
    w, dy, mask, temperature, pi, squares, weighted, mass, product, d_energy, sums, d_temperature,
    table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each share, sums of ``w^2`` times it over the chunk, and the temperature's, [chunks, H]."""
    chunk, sequence, _, begin, end = common.place(table, chunks, N, CHUNK)
    dtype: tl.constexpr = pi.dtype.element_ty
    h = tl.arange(0, HP)
    t = common.load_heads(temperature, H, HP)
    inverse = load_inverse(squares, sequence, H, D, HP, DP)
    m = tl.load(mass + sequence * H + h, h < H, 1.0)[:, None] + common.MASS_FLOOR
    moment = common.load_sums(weighted, sequence, H, D, HP, DP) / m
    gain = 1.0 / (1.0 + moment)
    d_weighted = gain * gain * common.load_sums(product, sequence, H, D, HP, DP) / m
    d_mass = -tl.sum(d_weighted * moment, 1)
    total = tl.zeros([T, HP, DP], dtype)
    total_temperature = tl.zeros([T, HP], dtype)
    for i in range(0, CHUNK, T):
        rows, real = common.rows_of(mask, begin + i, end, T)
        x = common.load_tile(w, rows, real, H, D, HP, DP, dtype)
        o = common.load_tile(dy, rows, real, H, D, HP, DP, dtype)
        p = tl.load(pi + rows[:, None] * H + h[None, :], real[:, None] & (h < H)[None, :], 0.0)
        d_pi = tl.sum(x * (x * d_weighted[None, :, :] - o * gain[None, :, :]), 2) + d_mass[None, :]
        d_logit = p * (d_pi - tl.sum(p * d_pi, 1)[:, None])
        d_share = t[None, :] * d_logit
        common.store_heads(d_energy, d_share, rows, end, H, HP)
        total_temperature += d_logit * shares(x * x, inverse)
        if squares is not None:
            total += x * x * d_share[:, :, None]
    common.store_masses(d_temperature, tl.sum(total_temperature, 0), chunk, H, HP)
    if squares is not None:
        common.store_sums(sums, tl.sum(total, 0), chunk, H, D, HP, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def gradient(
    w, dy, mask, pi, squares, weighted, mass, product, d_energy, reach, dw, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write dw for a chunk and a head; `reach` is the sum of ``w^2`` times the gradient of each share."""
    _, sequence, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x, o, p = common.load_token_gradients(w, dy, pi, rows, head, real, H, D, DP)
    d_share = tl.load(d_energy + rows * H + head, real, 0.0)
    m, gain = load_gain(weighted, mass, sequence, head, H, D, DP)
    d_weighted = gain * gain * common.load_sum(product, sequence, head, H, D, DP) / m
    through = p[:, None] * d_weighted[None, :]
    if squares is None:
        through += d_share[:, None]
    else:
        total = common.load_sum(squares, sequence, head, H, D, DP)
        inverse = 1.0 / tl.maximum(total, SQUARE_FLOOR)
        # Multiplied one by one: the square of the inverse may leave float32.
        d_squares = -inverse * (inverse * common.load_sum(reach, sequence, head, H, D, DP))
        d_squares = tl.where(total > SQUARE_FLOOR, d_squares, 0.0)
        through += d_share[:, None] * inverse[None, :] + d_squares[None, :]
    common.store_head(dw, 2.0 * x * through - p[:, None] * o * gain[None, :], rows, head, end, H, D, DP)
