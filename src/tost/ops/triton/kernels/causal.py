"""The kernels of the causal operator. What is in the module `common` holds here.

Shapes: w, y, dy, dw [rows, H, D], mask [rows], temperature [H], pi and what is per token and head [rows, H]; bias and
scale [rows, H], or [N, H] where all sequences share them; sums at the start of each chunk, and gradients from later
chunks, [chunks, H, D], for the masses [chunks, H].
"""

import triton
import triton.language as tl

from tost.ops import _numerics
from tost.ops.triton.kernels.common import (
    counted,
    fade_and_add,
    fading,
    load_head,
    load_sum,
    load_sums,
    load_tile,
    load_token_gradients,
    place,
    reaching,
    real_tokens,
    rows_of,
    rows_of_head,
    running,
    softmax,
    store_fade,
    store_head,
    store_heads,
    store_sum,
    store_sums,
    summed_back,
)

PREFIX_FLOOR = tl.constexpr(_numerics.PREFIX_FLOOR)
MASS_FLOOR = tl.constexpr(_numerics.MASS_FLOOR)


@triton.jit(do_not_specialize=["chunks", "N"])
def memberships(
    w, mask, temperature, bias, scale, powers, starts, pi, sums, masses, table, chunks, N,
    BIAS_SHARED: tl.constexpr, SCALE_SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the memberships of a chunk, and its sums of ``pi w^2`` and of pi."""
    chunk, _, first, begin, end = place(table, chunks, N, CHUNK)
    dtype: tl.constexpr = pi.dtype.element_ty
    h = tl.arange(0, HP)
    heads = (h < H)[None, :]
    t = tl.load(temperature + h, h < H, 0.0)
    carry = load_sums(starts, chunk, H, D, HP, DP)
    total = tl.zeros([HP, DP], dtype)
    total_mass = tl.zeros([HP], dtype)
    for i in range(0, CHUNK, T):
        rows, real = rows_of(mask, begin + i, end, T)
        x = load_tile(w, rows, real, H, D, HP, DP, dtype)
        square = x * x
        if powers is None:
            prefix = tl.cumsum(square, 0) + carry[None, :, :]
        else:
            seen = counted(real)
            row = powers + h * (CHUNK + 1)
            since = tl.load(row[None, :] + seen[:, None], heads, 1.0)
            left = tl.load(row[None, :] + (tl.sum(real.to(tl.int32), 0) - seen)[:, None], heads, 1.0)
            fade = tl.load(row + tl.sum(real.to(tl.int32), 0), h < H, 1.0)
            factor = tl.where(real[:, None], tl.load(row + 1, h < H, 1.0)[None, :], 1.0)
            factor = tl.broadcast_to(factor[:, :, None], square.shape)
            within = tl.associative_scan((factor, square), 0, fade_and_add)[1]
            prefix = within + since[:, :, None] * carry[None, :, :]
        energy = tl.sum(square / tl.maximum(prefix, PREFIX_FLOOR), 2)
        inside = (rows < end)[:, None] & heads
        if scale is not None:
            scale_rows = rows - first if SCALE_SHARED else rows
            energy = energy * tl.load(scale + scale_rows[:, None] * H + h[None, :], inside, 0.0)
        if bias is not None:
            bias_rows = rows - first if BIAS_SHARED else rows
            energy = energy + D * tl.load(bias + bias_rows[:, None] * H + h[None, :], inside, 0.0)
        p = tl.where(real[:, None] & heads, softmax(t[None, :] * energy, heads), 0.0)
        store_heads(pi, p, rows, end, H, HP)
        if powers is None:
            carry += tl.sum(square, 0)
            total += tl.sum(p[:, :, None] * square, 0)
            total_mass += tl.sum(p, 0)
        else:
            carry = carry * fade[:, None] + tl.sum(square * left[:, :, None], 0)
            p = p * left
            total = total * fade[:, None] + tl.sum(p[:, :, None] * square, 0)
            total_mass = total_mass * fade + tl.sum(p, 0)
    store_sums(sums, total, chunk, H, D, HP, DP)
    tl.store(masses + chunk * H + h, total_mass, h < H)


@triton.jit(do_not_specialize=["chunks", "N"])
def output(
    w, mask, pi, powers, weighted, mass, y, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write y for a chunk and a head."""
    chunk, _, _, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    x = load_head(w, rows, head, real, H, D, DP, pi.dtype.element_ty)
    p = tl.load(pi + rows * H + head, real, 0.0)
    total = running(p[:, None] * (x * x), load_sum(weighted, chunk, head, H, D, DP), real, powers, head, CHUNK)
    m = running(p, tl.load(mass + chunk * H + head), real, powers, head, CHUNK) + MASS_FLOOR
    value = -p[:, None] * x * (m[:, None] / (m[:, None] + total))
    store_head(y, value, rows, head, end, H, D, DP)


@triton.jit
def step(
    w, mask, temperature, bias, scale, decay, squares, weighted, mass, y, squares_after, weighted_after, mass_after,
    BIAS_SHARED: tl.constexpr, SCALE_SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Advance a sequence by one token: y and the sums after it. The sums before are zero if `squares` is None."""
    sequence = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = squares_after.dtype.element_ty
    h, d = tl.arange(0, HP), tl.arange(0, DP)
    inside = (h < H)[:, None] & (d < D)[None, :]
    lane = h[:, None] * D + d[None, :]
    own, own_mass = sequence * (H * D) + lane, sequence * H + h
    real = h < H
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
        energy = energy * tl.load(scale + (h if SCALE_SHARED else own_mass), h < H, 0.0)
    if bias is not None:
        energy = energy + D * tl.load(bias + (h if BIAS_SHARED else own_mass), h < H, 0.0)
    logit = tl.load(temperature + h, h < H, 0.0) * energy
    logit = tl.where(h < H, logit, float("-inf"))
    weight = tl.exp(logit - tl.max(logit, 0))
    p = tl.where(real, weight / tl.sum(weight, 0), 0.0)
    total += p[:, None] * square
    m += p
    floored = (m + MASS_FLOOR)[:, None]
    tl.store(y + own, (-p[:, None] * x * (floored / (floored + total))).to(y.dtype.element_ty), inside)
    tl.store(squares_after + own, c, inside)
    tl.store(weighted_after + own, total, inside)
    tl.store(mass_after + own_mass, m, h < H)


@triton.jit
def replay(w, dy, pi, weighted, mass, chunk, head, rows, real, powers, H: tl.constexpr, D: tl.constexpr,
           DP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return w, dy [CHUNK, DP], pi [CHUNK], the gain and the direct gradients of the sums of ``pi w^2`` and of pi."""
    x, o, p = load_token_gradients(w, dy, pi, rows, head, real, H, D, DP)
    total = running(p[:, None] * (x * x), load_sum(weighted, chunk, head, H, D, DP), real, powers, head, CHUNK)
    m = running(p, tl.load(mass + chunk * H + head), real, powers, head, CHUNK)[:, None] + MASS_FLOOR
    gain = m / (m + total)
    direct = gain * gain * p[:, None] * o * x / m
    return x, o, p, gain, direct, -tl.sum(direct * total / m, 1)


@triton.jit(do_not_specialize=["chunks", "N"])
def products(
    w, dy, mask, pi, powers, weighted, mass, sums, masses, fades, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk what the outputs of one head hand to the sums of ``pi w^2`` and of pi."""
    chunk, _, _, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    _, _, _, _, direct, to_mass = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, powers, H, D, DP, CHUNK)
    store_sum(sums, summed_back(direct, real, powers, head, CHUNK), chunk, head, H, D, DP)
    tl.store(masses + chunk * H + head, summed_back(to_mass, real, powers, head, CHUNK))
    store_fade(fades, chunk, head, real, powers, H, CHUNK)


@triton.jit(do_not_specialize=["chunks", "N"])
def d_memberships(
    w, dy, mask, pi, powers, weighted, mass, later_weighted, later_mass, d_pi, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the memberships for a chunk and a head."""
    chunk, _, _, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    after = real_tokens(mask, rows + 1, begin, end)
    x, o, _, gain, direct, to_mass = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, powers, H, D, DP, CHUNK)
    later = load_sum(later_weighted, chunk, head, H, D, DP)
    bar = reaching(direct, later, real, after, powers, head, CHUNK)
    bar_mass = reaching(to_mass, tl.load(later_mass + chunk * H + head), real, after, powers, head, CHUNK)
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
def through_shares(x, t, dl, scale_at, squares, chunk, head, real, powers, H: tl.constexpr, D: tl.constexpr,
                   DP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return ``1 / c``, the gradient of each share [CHUNK], and the direct gradients of c, [CHUNK, DP]."""
    square = x * x
    total = running(square, load_sum(squares, chunk, head, H, D, DP), real, powers, head, CHUNK)
    inverse = 1.0 / tl.maximum(total, PREFIX_FLOOR)
    d_share = t * dl
    if scale_at is not None:
        d_share = d_share * tl.load(scale_at, real, 0.0)
    direct = -d_share[:, None] * (square * inverse) * inverse
    return inverse, d_share, tl.where(total > PREFIX_FLOOR, direct, 0.0)


@triton.jit(do_not_specialize=["chunks", "N"])
def shares(
    w, mask, temperature, bias, scale, powers, squares, d_logit, sums, d_temperature, d_scale, table, chunks, N,
    BIAS_SHARED: tl.constexpr, SCALE_SHARED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk what its shares hand to the sums of ``w^2``; gradients of the temperature and of the scale."""
    chunk, _, first, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    x = load_head(w, rows, head, real, H, D, DP, d_logit.dtype.element_ty)
    dl = tl.load(d_logit + rows * H + head, real, 0.0)
    t = tl.load(temperature + head)
    scale_at = None
    if scale is not None:
        scale_at = scale + (rows - first if SCALE_SHARED else rows) * H + head
    inverse, _, direct = through_shares(x, t, dl, scale_at, squares, chunk, head, real, powers, H, D, DP, CHUNK)
    energy = tl.sum(x * x * inverse, 1)
    if scale is not None:
        tl.store(d_scale + rows * H + head, t * dl * energy, rows < end)
        energy = energy * tl.load(scale_at, real, 0.0)
    if bias is not None:
        bias_rows = rows - first if BIAS_SHARED else rows
        energy = energy + D * tl.load(bias + bias_rows * H + head, real, 0.0)
    tl.store(d_temperature + chunk * H + head, tl.sum(dl * energy, 0))
    store_sum(sums, summed_back(direct, real, powers, head, CHUNK), chunk, head, H, D, DP)


@triton.jit(do_not_specialize=["chunks", "N"])
def gradient(
    w, dy, mask, temperature, scale, pi, powers, squares, weighted, mass, d_logit,
    later_squares, later_weighted, later_mass, dw, d_decay, table, chunks, N,
    SCALE_SHARED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write dw for a chunk and a head, and with a decay its gradient [chunks, H]."""
    chunk, _, first, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    after = real_tokens(mask, rows + 1, begin, end)
    x, o, p, gain, direct, to_mass = replay(w, dy, pi, weighted, mass, chunk, head, rows, real, powers, H, D, DP, CHUNK)
    bar = reaching(direct, load_sum(later_weighted, chunk, head, H, D, DP), real, after, powers, head, CHUNK)
    value = 2.0 * x * p[:, None] * bar - p[:, None] * o * gain
    dl = tl.load(d_logit + rows * H + head, real, 0.0)
    scale_at = None
    if scale is not None:
        scale_at = scale + (rows - first if SCALE_SHARED else rows) * H + head
    inverse, d_share, direct = through_shares(
        x, tl.load(temperature + head), dl, scale_at, squares, chunk, head, real, powers, H, D, DP, CHUNK
    )
    bar_squares = reaching(direct, load_sum(later_squares, chunk, head, H, D, DP), real, after, powers, head, CHUNK)
    value += 2.0 * x * (d_share[:, None] * inverse + bar_squares)
    store_head(dw, value, rows, head, end, H, D, DP)
    if powers is not None:
        bar_mass = reaching(to_mass, tl.load(later_mass + chunk * H + head), real, after, powers, head, CHUNK)
        # The sums before every token: the same scan, one row later.
        before = real_tokens(mask, rows - 1, begin, end)
        x = load_head(w, rows - 1, head, before, H, D, DP, pi.dtype.element_ty)
        p = tl.load(pi + (rows - 1) * H + head, before, 0.0)
        seen = counted(real) - real.to(tl.int32)
        square = x * x
        start = load_sum(weighted, chunk, head, H, D, DP)
        total = bar * fading(p[:, None] * square, start, before, seen, powers, head, CHUNK)
        start = load_sum(squares, chunk, head, H, D, DP)
        total += bar_squares * fading(square, start, before, seen, powers, head, CHUNK)
        start = tl.load(mass + chunk * H + head)
        by_mass = bar_mass * fading(p, start, before, seen, powers, head, CHUNK)
        tl.store(d_decay + chunk * H + head, tl.sum(tl.where(real, tl.sum(total, 1) + by_mass, 0.0), 0))
