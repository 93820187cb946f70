"""What all kernels share: chunks of tokens, and sums and scans over chunks.

A sequence is cut into chunks of CHUNK tokens. Rows are tokens of all sequences, one after the other. Where a chunk lies
follows from its number if all sequences have N tokens, in `chunks` chunks each. Otherwise a table says it, int64
``[chunks of all sequences, 4]``: the sequence, its first row, the chunk's first row, and the row after its last; and
`bounds`, int64 ``[sequences + 1]``, has the number of each sequence's first chunk. A chunk has tokens of one sequence.

HP and DP are H and D rounded up to powers of two. Pointers that a call does not need are None, which is known when a
kernel is compiled.
"""

import triton
import triton.language as tl

from tost.ops import _numerics

MASS_FLOOR = tl.constexpr(_numerics.MASS_FLOOR)


@triton.jit
def place(table, chunks, N, CHUNK: tl.constexpr):
    """Return this program's chunk, its sequence, the sequence's first row, and the chunk's first row and end."""
    chunk = tl.program_id(0).to(tl.int64)
    if table is None:
        sequence = chunk // chunks
        first = sequence * N
        begin = first + (chunk % chunks) * CHUNK
        end = tl.minimum(begin + CHUNK, first + N)
    else:
        sequence = tl.load(table + chunk * 4)
        first = tl.load(table + chunk * 4 + 1)
        begin = tl.load(table + chunk * 4 + 2)
        end = tl.load(table + chunk * 4 + 3)
    return chunk, sequence, first, begin, end


@triton.jit
def chunks_of(bounds, chunks, sequence):
    """Return the number of a sequence's first chunk, and how many chunks it has."""
    if bounds is None:
        low = sequence * chunks
        high = low + chunks
    else:
        low = tl.load(bounds + sequence)
        high = tl.load(bounds + sequence + 1)
    return low, high - low


@triton.jit
def real_tokens(mask, rows, begin, end):
    """Return which rows are tokens of the chunk and not padding."""
    real = (rows >= begin) & (rows < end)
    if mask is not None:
        real = real & (tl.load(mask + rows, real, 0) != 0)
    return real


@triton.jit
def rows_of(mask, begin, end, COUNT: tl.constexpr):
    """Return COUNT rows of a chunk from `begin` on, and which of them are tokens and not padding."""
    rows = begin + tl.arange(0, COUNT)
    return rows, real_tokens(mask, rows, begin, end)


@triton.jit
def rows_of_head(mask, begin, end, CHUNK: tl.constexpr):
    """Return this program's head, the rows of its chunk, and which of them are tokens and not padding."""
    rows, real = rows_of(mask, begin, end, CHUNK)
    return tl.program_id(1), rows, real


@triton.jit
def head_lanes(rows, head, kept, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return where one head of some rows lies, [rows, DP], and which of it exists in the rows that are kept."""
    d = tl.arange(0, DP)
    return (rows * H + head)[:, None] * D + d[None, :], kept[:, None] & (d < D)[None, :]


@triton.jit
def load_head(x, rows, head, real, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, dtype: tl.constexpr):
    """Return one head of the real tokens, [rows, DP], 0 for the others."""
    at, inside = head_lanes(rows, head, real, H, D, DP)
    return tl.load(x + at, inside, 0.0).to(dtype)


@triton.jit
def store_head(x, value, rows, head, end, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Write one head of all rows of the chunk."""
    at, inside = head_lanes(rows, head, rows < end, H, D, DP)
    tl.store(x + at, value.to(x.dtype.element_ty), inside)


@triton.jit
def load_token_gradients(w, dy, pi, rows, head, real, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return w and dy [rows, DP] and pi [rows] of one head, in the dtype of pi."""
    x = load_head(w, rows, head, real, H, D, DP, pi.dtype.element_ty)
    o = load_head(dy, rows, head, real, H, D, DP, pi.dtype.element_ty)
    return x, o, tl.load(pi + rows * H + head, real, 0.0)


@triton.jit
def sum_lanes(index, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Return where the sums with the given index lie, [HP, DP], and which of them exist."""
    h, d = tl.arange(0, HP), tl.arange(0, DP)
    return index * (H * D) + h[:, None] * D + d[None, :], (h < H)[:, None] & (d < D)[None, :]


@triton.jit
def tile_lanes(rows, kept, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Return where all heads of some rows lie, [rows, HP, DP], and which of it exists in the rows that are kept."""
    lane, inside = sum_lanes(0, H, D, HP, DP)
    return rows[:, None, None] * (H * D) + lane[None, :, :], kept[:, None, None] & inside[None, :, :]


@triton.jit
def load_tile(x, rows, real, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, dtype: tl.constexpr):
    """Return all heads of the real tokens, [rows, HP, DP], 0 for the others."""
    at, inside = tile_lanes(rows, real, H, D, HP, DP)
    return tl.load(x + at, inside, 0.0).to(dtype)


@triton.jit
def store_tile(x, value, rows, end, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Write all heads of all rows of the chunk."""
    at, inside = tile_lanes(rows, rows < end, H, D, HP, DP)
    tl.store(x + at, value.to(x.dtype.element_ty), inside)


@triton.jit
def store_heads(x, value, rows, end, H: tl.constexpr, HP: tl.constexpr):
    """Write one number per head, [rows, HP], for all rows of the chunk."""
    h = tl.arange(0, HP)
    tl.store(x + rows[:, None] * H + h[None, :], value, (rows < end)[:, None] & (h < H)[None, :])


@triton.jit
def load_heads(x, H: tl.constexpr, HP: tl.constexpr):
    """Return one number per head, [HP]."""
    h = tl.arange(0, HP)
    return tl.load(x + h, h < H, 0.0)


@triton.jit
def load_sum(x, index, head, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return the sums of one head with the given index, [DP]."""
    d = tl.arange(0, DP)
    return tl.load(x + (index * H + head) * D + d, d < D, 0.0)


@triton.jit
def store_sum(x, value, index, head, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Write the sums [DP] of one head with the given index."""
    d = tl.arange(0, DP)
    tl.store(x + (index * H + head) * D + d, value, d < D)


@triton.jit
def load_sums(x, index, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Return the sums of all heads with the given index, [HP, DP]."""
    at, inside = sum_lanes(index, H, D, HP, DP)
    return tl.load(x + at, inside, 0.0)


@triton.jit
def store_sums(x, value, index, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr):
    """Write the sums [HP, DP] of all heads with the given index."""
    at, inside = sum_lanes(index, H, D, HP, DP)
    tl.store(x + at, value, inside)


@triton.jit
def store_masses(x, value, index, H: tl.constexpr, HP: tl.constexpr):
    """Write one number per head, [HP], with the given index."""
    h = tl.arange(0, HP)
    tl.store(x + index * H + h, value, h < H)


@triton.jit
def softmax(logit, H: tl.constexpr, HP: tl.constexpr):
    """Return the softmax over the heads that exist, of logits [rows, HP]; 0 for the others."""
    logit = tl.where((tl.arange(0, HP) < H)[None, :], logit, float("-inf"))
    weight = tl.exp(logit - tl.max(logit, 1)[:, None])
    return weight / tl.sum(weight, 1)[:, None]


@triton.jit(do_not_specialize=["chunks", "N"])
def chunk_squares(
    w, mask, sums, table, chunks, N,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of a chunk and a head, [chunks, H, D]."""
    chunk, _, _, begin, end = place(table, chunks, N, CHUNK)
    head, rows, real = rows_of_head(mask, begin, end, CHUNK)
    x = load_head(w, rows, head, real, H, D, DP, sums.dtype.element_ty)
    store_sum(sums, tl.sum(x * x, 0), chunk, head, H, D, DP)


@triton.jit(do_not_specialize=["chunks"])
def add_chunks(
    sums, masses, totals, mass, bounds, chunks,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the sums of a sequence's chunks for one head, in order: [chunks, H, D] -> [sequences, H, D]."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, count = chunks_of(bounds, chunks, sequence)
    total = tl.zeros([BLOCK, DP], totals.dtype.element_ty)
    total_mass = tl.zeros([BLOCK], totals.dtype.element_ty)
    for i in range(0, count, BLOCK):
        c = i + tl.arange(0, BLOCK)
        inside = c < count
        total += load_head(sums, low + c, head, inside, H, D, DP, totals.dtype.element_ty)
        if masses is not None:
            total_mass += tl.load(masses + (low + c) * H + head, inside, 0.0)
    store_sum(totals, tl.sum(total, 0), sequence, head, H, D, DP)
    if masses is not None:
        tl.store(mass + sequence * H + head, tl.sum(total_mass, 0))


@triton.jit(do_not_specialize=["chunks"])
def scan_chunks(
    sums, masses, before, mass_before, starts, mass_starts, after, mass_after, bounds, chunks,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Write what each chunk of a sequence starts with, for one head: [chunks, H, D] -> [chunks, H, D].

    The first chunk starts with `before` (zero if None), [sequences, H, D], and `after` is what the last one leaves.
    BACKWARD goes from the last chunk to the first. The same with the masses, unless they are None.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, count = chunks_of(bounds, chunks, sequence)
    carry = tl.zeros([DP], starts.dtype.element_ty)
    carry_mass = tl.sum(carry, 0)
    if before is not None:
        carry = load_sum(before, sequence, head, H, D, DP)
    if mass_before is not None:
        carry_mass = tl.load(mass_before + sequence * H + head)
    last = low + count - 1
    entry = last if BACKWARD else low
    if count > 0:
        store_sum(starts, carry, entry, head, H, D, DP)
        if masses is not None:
            tl.store(mass_starts + entry * H + head, carry_mass)
    for i in range(0, count, BLOCK):
        step = i + tl.arange(0, BLOCK)
        c = (last - step) if BACKWARD else (low + step)
        to = (c - 1) if BACKWARD else (c + 1)
        inside, onward = step < count, step + 1 < count
        x = load_head(sums, c, head, inside, H, D, DP, starts.dtype.element_ty)
        total = tl.cumsum(x, 0) + carry[None, :]
        at, exists = head_lanes(to, head, onward, H, D, DP)
        tl.store(starts + at, total, exists)
        carry = tl.sum(tl.where((tl.arange(0, BLOCK) == BLOCK - 1)[:, None], total, 0.0), 0)
        if masses is not None:
            total_mass = tl.cumsum(tl.load(masses + c * H + head, inside, 0.0), 0) + carry_mass
            tl.store(mass_starts + to * H + head, total_mass, onward)
            carry_mass = tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, total_mass, 0.0), 0)
    store_sum(after, carry, sequence, head, H, D, DP)
    if masses is not None:
        tl.store(mass_after + sequence * H + head, carry_mass)
