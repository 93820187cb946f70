"""The kernels of the causal operator. What is in the module `common` holds here.

Shapes: w, y, dy, dw [rows, H, D], mask [rows], temperature [H], pi and what is per token and head [rows, H]; bias and
scale [rows, H], or [N, H] where all sequences share them; sums at the start of each chunk, and gradients from later
chunks, [chunks, H, D], for the masses [chunks, H].
"""

import triton
import triton.language as tl

from tost.ops import _numerics
from tost.ops.triton.kernels import common

PREFIX_FLOOR = tl.constexpr(_numerics.PREFIX_FLOOR)


@triton.jit
def load_of_tokens(x, rows, first, inside, heads, H: tl.constexpr, SHARED: tl.constexpr):
    """Return the bias or the scale of some rows and heads. SHARED: it is the same for all sequences."""
    if SHARED:
        rows = rows - first
    return tl.load(x + rows * H + heads, inside, 0.0)


@triton.jit
def moments(x, p, weighted, mass, chunk, head, real, powers, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
            CHUNK: tl.constexpr):  # fmt: skip
    """Return the sums of ``pi w^2`` up to every row, [CHUNK, DP], and those of pi with their floor, [CHUNK, 1]."""
    start = common.load_sum(weighted, chunk, head, H, D, DP)
    total = common.running(p[:, None] * (x * x), start, real, powers, head, CHUNK)
    m = common.running(p, tl.load(mass + chunk * H + head), real, powers, head, CHUNK)
    return total, m[:, None] + common.MASS_FLOOR


@triton.jit(do_not_specialize=["chunks", "N"])
def memberships(
    w, mask, temperature, bias, scale, powers, starts, pi, sums, masses, table, chunks, N,
    BIAS_SHARED: tl.constexpr, SCALE_SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the memberships of a chunk, and its sums of ``pi w^2`` and of pi."""
    chunk, _, first, begin, end = common.place(table, chunks, N, CHUNK)
    dtype: tl.constexpr = pi.dtype.element_ty
    h = tl.arange(0, HP)
    heads = (h < H)[None, :]
    t = tl.load(temperature + h, h < H, 0.0)
    carry = common.load_sums(starts, chunk, H, D, HP, DP)
    total = tl.zeros([HP, DP], dtype)
    total_mass = tl.zeros([HP], dtype)
    for i in range(0, CHUNK, T):
        rows, real = common.rows_of(mask, begin + i, end, T)
        x = common.load_tile(w, rows, real, H, D, HP, DP, dtype)
        square = x * x
        if powers is None:
            prefix = tl.cumsum(square, 0) + carry[None, :, :]
        else:
            seen = common.counted(real)
            row = powers + h * (CHUNK + 1)
            since = tl.load(row[None, :] + seen[:, None], heads, 1.0)
            left = tl.load(row[None, :] + (tl.sum(real.to(tl.int32), 0) - seen)[:, None], heads, 1.0)
            fade = tl.load(row + tl.sum(real.to(tl.int32), 0), h < H, 1.0)
            factor = tl.where(real[:, None], tl.load(row + 1, h < H, 1.0)[None, :], 1.0)
            factor = tl.broadcast_to(factor[:, :, None], square.shape)
            within = tl.associative_scan((factor, square), 0, common.fade_and_add)[1]
            prefix = within + since[:, :, None] * carry[None, :, :]
        energy = tl.sum(square / tl.maximum(prefix, PREFIX_FLOOR), 2)
        inside = (rows < end)[:, None] & heads
        if scale is not None:
            energy = energy * load_of_tokens(scale, rows[:, None], first, inside, h[None, :], H, SCALE_SHARED)
        if bias is not None:
            energy = energy + D * load_of_tokens(bias, rows[:, None], first, inside, h[None, :], H, BIAS_SHARED)
        p = tl.where(real[:, None], common.softmax(t[None, :] * energy, H, HP), 0.0)
        common.store_heads(pi, p, rows, end, H, HP)
        if powers is None:
            carry += tl.sum(square, 0)
            total += tl.sum(p[:, :, None] * square, 0)
            total_mass += tl.sum(p, 0)
        else:
            carry = carry * fade[:, None] + tl.sum(square * left[:, :, None], 0)
            p = p * left
            total = total * fade[:, None] + tl.sum(p[:, :, None] * square, 0)
            total_mass = total_mass * fade + tl.sum(p, 0)
    common.store_sums(sums, total, chunk, H, D, HP, DP)
    common.store_masses(masses, total_mass, chunk, H, HP)


@triton.jit(do_not_specialize=["chunks", "N"])
def output(
    w, mask, pi, powers, weighted, mass, y, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write y for a chunk and a head."""
    chunk, _, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x = common.load_head(w, rows, head, real, H, D, DP, pi.dtype.element_ty)
    p = tl.load(pi + rows * H + head, real, 0.0)
    total, m = moments(x, p, weighted, mass, chunk, head, real, powers, H, D, DP, CHUNK)
    common.store_head(y, -p[:, None] * x * (m / (m + total)), rows, head, end, H, D, DP)


@triton.jit
def step(
    w, mask, temperature, bias, scale, decay, squares, weighted, mass, y, squares_after, weighted_after, mass_after,
    BIAS_SHARED: tl.constexpr, SCALE_SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Advance a sequence by one token: y and the sums after it. The sums before are zero if `squares` is None."""
    sequence = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = squares_after.dtype.element_ty
    own, inside = common.sum_lanes(sequence, H, D, HP, DP)
    h = tl.arange(0, HP)
    own_mass, real = sequence * H + h, h < H
    if mask is not None:
        real = real & (tl.load(mask + sequence + h * 0, real, 0) != 0)
    x = tl.load(w + own, inside & real[:, None], 0.0).to(dtype)
    square = x * x
    c, total, m = square, tl.zeros([HP, DP], dtype), tl.zeros([HP], dtype)
    if squares is not None:
        before = tl.load(squares + own, inside, 0.0)
        total = tl.load(weighted + own, inside, 0.0)
        m = tl.load(mass + own_mass, h < H, 0.0)
        if decay is not None:
            factor = tl.where(real, tl.load(decay + h, h < H, 1.0), 1.0)
            before, total, m = before * factor[:, None], total * factor[:, None], m * factor
        c = before + square
    energy = tl.sum(square / tl.maximum(c, PREFIX_FLOOR), 1)
    if scale is not None:
        energy = energy * load_of_tokens(scale, sequence, sequence, h < H, h, H, SCALE_SHARED)
    if bias is not None:
        energy = energy + D * load_of_tokens(bias, sequence, sequence, h < H, h, H, BIAS_SHARED)
    logit = tl.load(temperature + h, h < H, 0.0) * energy
    p = tl.where(real, tl.sum(common.softmax(logit[None, :], H, HP), 0), 0.0)
    total += p[:, None] * square
    m += p
    floored = (m + common.MASS_FLOOR)[:, None]
    tl.store(y + own, (-p[:, None] * x * (floored / (floored + total))).to(y.dtype.element_ty), inside)
    tl.store(squares_after + own, c, inside)
    tl.store(weighted_after + own, total, inside)
    common.store_masses(mass_after, m, sequence, H, HP)


@triton.jit
def replay(w, dy, pi, weighted, mass, chunk, head, rows, real, powers, H: tl.constexpr, D: tl.constexpr,
           DP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return w, dy [CHUNK, DP], pi [CHUNK], the gain and the direct gradients of the sums of ``pi w^2`` and of pi."""
    x, o, p = common.load_token_gradients(w, dy, pi, rows, head, real, H, D, DP)
    total, m = moments(x, p, weighted, mass, chunk, head, real, powers, H, D, DP, CHUNK)
    gain = m / (m + total)
    direct = gain * gain * p[:, None] * o * x / m
    return x, o, p, gain, direct, -tl.sum(direct * total / m, 1)


@triton.jit(do_not_specialize=["chunks", "N"])
def products(
    w, dy, mask, pi, powers, weighted, mass, sums, masses, fades, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk what the outputs of one head hand to the sums of ``pi w^2`` and of pi."""
    chunk, _, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    _, _, _, _, direct, to_mass = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, powers, H, D, DP, CHUNK)
    common.store_sum(sums, common.summed_back(direct, real, powers, head, CHUNK), chunk, head, H, D, DP)
    tl.store(masses + chunk * H + head, common.summed_back(to_mass, real, powers, head, CHUNK))
    common.store_fade(fades, chunk, head, real, powers, H, CHUNK)


@triton.jit(do_not_specialize=["chunks", "N"])
def d_memberships(
    w, dy, mask, pi, powers, weighted, mass, later_weighted, later_mass, d_pi, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the memberships for a chunk and a head."""
    chunk, _, _, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x, o, _, gain, direct, to_mass = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, powers, H, D, DP, CHUNK)
    later = common.load_sum(later_weighted, chunk, head, H, D, DP)
    bar = common.reaching(direct, later, real, powers, head, CHUNK)
    bar_mass = common.reaching(to_mass, tl.load(later_mass + chunk * H + head), real, powers, head, CHUNK)
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
def through_shares(x, d_share, squares, chunk, head, real, powers, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                   CHUNK: tl.constexpr):  # fmt: skip
    """Return ``1 / c`` and the direct gradients of c, [CHUNK, DP], from those of the shares, [CHUNK]."""
    square = x * x
    total = common.running(square, common.load_sum(squares, chunk, head, H, D, DP), real, powers, head, CHUNK)
    inverse = 1.0 / tl.maximum(total, PREFIX_FLOOR)
    direct = -d_share[:, None] * (square * inverse) * inverse
    return inverse, tl.where(total > PREFIX_FLOOR, direct, 0.0)


@triton.jit(do_not_specialize=["chunks", "N"])
def shares(
    w, mask, temperature, bias, scale, powers, squares, d_logit, sums, d_temperature, d_scale, table, chunks, N,
    BIAS_SHARED: tl.constexpr, SCALE_SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk what its shares hand to the sums of ``w^2``; gradients of the temperature and of the scale."""
    chunk, _, first, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x = common.load_head(w, rows, head, real, H, D, DP, d_logit.dtype.element_ty)
    dl = tl.load(d_logit + rows * H + head, real, 0.0)
    d_energy = tl.load(temperature + head) * dl
    d_share = d_energy
    if scale is not None:
        s = load_of_tokens(scale, rows, first, real, head, H, SCALE_SHARED)
        d_share = d_energy * s
    inverse, direct = through_shares(x, d_share, squares, chunk, head, real, powers, H, D, DP, CHUNK)
    energy = tl.sum(x * x * inverse, 1)
    if scale is not None:
        tl.store(d_scale + rows * H + head, d_energy * energy, rows < end)
        energy = energy * s
    if bias is not None:
        energy = energy + D * load_of_tokens(bias, rows, first, real, head, H, BIAS_SHARED)
    tl.store(d_temperature + chunk * H + head, tl.sum(dl * energy, 0))
    common.store_sum(sums, common.summed_back(direct, real, powers, head, CHUNK), chunk, head, H, D, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def gradient(
    w, dy, mask, temperature, scale, pi, powers, weighted, mass, squares, d_logit,
    later_squares, later_weighted, later_mass, dw, d_decay, table, chunks, N,
    SCALE_SHARED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write dw for a chunk and a head, and with a decay its gradient [chunks, H]."""
    chunk, _, first, begin, end = common.place(table, chunks, N, CHUNK)
    head, rows, real = common.rows_of_head(mask, begin, end, CHUNK)
    x, o, p, gain, direct, to_mass = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, powers, H, D, DP, CHUNK)
    later = common.load_sum(later_weighted, chunk, head, H, D, DP)
    bar = common.reaching(direct, later, real, powers, head, CHUNK)
    value = 2.0 * x * p[:, None] * bar - p[:, None] * o * gain
    d_share = tl.load(temperature + head) * tl.load(d_logit + rows * H + head, real, 0.0)
    if scale is not None:
        d_share = d_share * load_of_tokens(scale, rows, first, real, head, H, SCALE_SHARED)
    inverse, direct = through_shares(x, d_share, squares, chunk, head, real, powers, H, D, DP, CHUNK)
    later = common.load_sum(later_squares, chunk, head, H, D, DP)
    bar_squares = common.reaching(direct, later, real, powers, head, CHUNK)
    value += 2.0 * x * (d_share[:, None] * inverse + bar_squares)
    common.store_head(dw, value, rows, head, end, H, D, DP)
    if powers is not None:
        bar_mass = common.reaching(to_mass, tl.load(later_mass + chunk * H + head), real, powers, head, CHUNK)
        # The sums before every token: the same scan, one row later.
        before = common.real_tokens(mask, rows - 1, begin, end)
        x = common.load_head(w, rows - 1, head, before, H, D, DP, pi.dtype.element_ty)
        p = tl.load(pi + (rows - 1) * H + head, before, 0.0)
        seen = common.counted(real) - real.to(tl.int32)
        square = x * x
        start = common.load_sum(weighted, chunk, head, H, D, DP)
        total = bar * common.fading(p[:, None] * square, start, before, seen, powers, head, CHUNK)
        start = common.load_sum(squares, chunk, head, H, D, DP)
        total += bar_squares * common.fading(square, start, before, seen, powers, head, CHUNK)
        start = tl.load(mass + chunk * H + head)
        by_mass = bar_mass * common.fading(p, start, before, seen, powers, head, CHUNK)
        tl.store(d_decay + chunk * H + head, tl.sum(tl.where(real, tl.sum(total, 1) + by_mass, 0.0), 0))
