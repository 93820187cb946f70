// Non-causal TSSA. Symbols, one sequence, token n, head h, feature d:
//
//   s[h,d] = sum_n w^2            q = 1 / max(s, 1e-24)      (q = 1 without normalization)
//   e[n,h] = sum_d w^2 q          pi = softmax_h(t e)
//   A[h,d] = sum_n pi w^2         M[h] = sum_n pi            m = M + 1e-8
//   g[h,d] = 1 / (1 + A / m) = m / (m + A)                   y = -pi w g
//
// With statistics in blocks (kBlock other than 1) A[h,b] = sum_n pi w_b w_b^T and y_b = -pi m (m I + A)^{-1} w_b.
//
// Forward: three passes over w (s; pi, A, M; y). Backward: three passes over w and dy. Each pass is parallel over
// sequences and chunks of tokens.
#pragma once

#include "block_passes.h"
#include "common.h"

namespace {

// logits[k, h] = t[h] * sum_d w^2 q for the real rows of a chunk.
template <class T, int kWidth, class S>
inline void energies(const T* w, const Rows& rows, int64_t H, int64_t width, const S* q, S* out) {
  const int64_t D = kWidth ? kWidth : width;
  for (int k = 0; k < rows.count; ++k) {
    const T* row = w + rows.index[k] * H * D;
    for (int64_t h = 0; h < H; ++h) {
      S sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < D; ++d) {
        const S x = load(row[h * D + d]);
        sum += x * x * q[h * D + d];
      }
      out[k * H + h] = sum;
    }
  }
}

// A += pi w^2 over the real rows; weight[k, h] holds pi.
template <class T, int kWidth, class S>
inline void add_weighted_squares(const T* w, const Rows& rows, int64_t H, int64_t width, const S* weight, S* out) {
  const int64_t D = kWidth ? kWidth : width;
  for (int k = 0; k < rows.count; ++k) {
    const T* row = w + rows.index[k] * H * D;
    for (int64_t h = 0; h < H; ++h) {
      const S p = weight[k * H + h];
#pragma omp simd
      for (int64_t d = 0; d < D; ++d) {
        const S x = load(row[h * D + d]);
        out[h * D + d] += p * (x * x);
      }
    }
  }
}

template <class S>
inline S inverse_square_sum(S s) {
  return S(1) / (s > S(kSquareFloor) ? s : S(kSquareFloor));
}

template <class T, int kWidth, int kBlock>
int tssa_forward(const tost::Forward& call) {
  using S = compute_t<T>;
  const Layout layout(call.shape, call.sequences, call.cu_seqlens, tost::kChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const int64_t B = call.sequences, tokens = call.shape.B * call.shape.N, items = layout.items, H = call.shape.H;
  const int64_t D = kWidth ? kWidth : call.shape.D, HD = H * D;
  const auto w = static_cast<const T*>(call.w);
  const auto t = static_cast<const S*>(call.temperature);
  const auto y = static_cast<T*>(call.y);
  const int threads = useful_threads(call.threads, items, tokens * HD);
  const Blocks<S, kBlock> blocks(H, D, call.form.block_size);
  const int64_t HP = H * blocks.width, per_sequence = kBlock == 1 ? 0 : blocks.tiles * blocks.pairs;
  const int64_t per_thread = HP + tost::kChunk * H, per_work = BlockWork<S, kBlock>::count(blocks);

  Buffer<double> parts(items * HP), mass_parts(items * H);
  Buffer<S> scale(B * HD), scratch(threads * per_thread);
  Buffer<Lanes<S>> factors(B * per_sequence), works(threads * per_work);
  Buffer<S> inverses(kBlock > 1 ? B * HD * kBlock : 0);
  const bool keep = call.squares != nullptr;
  Buffer<S> own(keep ? 0 : tokens * H + B * HD + B * HP + B * H);
  if (layout.failed() || parts.failed() || mass_parts.failed() || scale.failed() || factors.failed() ||
      inverses.failed() || scratch.failed() || works.failed() || own.failed())
    return tost::kNoMemory;
  S* const pi = keep ? static_cast<S*>(call.pi) : own + 0;
  S* const squares = keep ? static_cast<S*>(call.squares) : pi + tokens * H;
  S* const weighted = keep ? static_cast<S*>(call.weighted) : squares + B * HD;
  S* const mass = keep ? static_cast<S*>(call.mass) : weighted + B * HP;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const sum = scratch + thread_index() * per_thread;
    S* const row_pi = sum + HP;
    const BlockWork<S, kBlock> work(blocks, works + thread_index() * per_work);

    if (call.form.normalize) {
#pragma omp for schedule(static)
      for (int64_t item = 0; item < items; ++item) {
        const Chunk chunk(layout, call.mask, item);
        const Rows& rows = chunk.rows;
        fill_zero(sum, HD);
        add_squares(w + chunk.token * HD, rows, HD, sum);
        widen(sum, HD, parts + item * HD);
      }
      total_over_chunks(layout, parts + 0, HD, squares);
    } else {
#pragma omp for schedule(static)
      for (int64_t j = 0; j < B * HD; ++j) squares[j] = 0;
    }
#pragma omp for schedule(static)
    for (int64_t j = 0; j < B * HD; ++j) scale[j] = call.form.normalize ? inverse_square_sum(squares[j]) : S(1);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const Rows& rows = chunk.rows;
      const T* const first = w + chunk.token * HD;
      S* const out = pi + chunk.token * H;
      energies<T, kWidth>(first, rows, H, D, scale + chunk.b * HD, row_pi);
      for (int64_t h = 0; h < H; ++h) mass_parts[item * H + h] = 0;
      for_each_masked(rows, [&](int n) { fill_zero(out + n * H, H); });
      for (int k = 0; k < rows.count; ++k)
        for (int64_t h = 0; h < H; ++h) row_pi[k * H + h] *= t[h];
      softmax_rows(row_pi, rows.count, H);
      for (int k = 0; k < rows.count; ++k) {
        for (int64_t h = 0; h < H; ++h) {
          out[rows.index[k] * H + h] = row_pi[k * H + h];
          mass_parts[item * H + h] += row_pi[k * H + h];
        }
      }
      fill_zero(sum, HP);
      if constexpr (kBlock == 1)
        add_weighted_squares<T, kWidth>(first, rows, H, D, row_pi, sum);
      else
        sum_products(blocks, work, first, rows, row_pi, sum);
      widen(sum, HP, parts + item * HP);
    }
    total_over_chunks(layout, parts + 0, HP, weighted);
    total_over_chunks(layout, mass_parts + 0, H, mass);
    if constexpr (kBlock == 1) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < B * H; ++i) {
        const S m = mass[i] + S(kMassFloor);
        for (int64_t d = 0; d < D; ++d) scale[i * D + d] = m / (m + weighted[i * D + d]);
      }
    } else {
      factor_tiles(blocks, work, B, mass, weighted, factors + 0);
      if constexpr (kBlock > 0) invert_tiles(blocks, B, mass, factors + 0, inverses + 0);
    }

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const Rows& rows = chunk.rows;
      const S* const g = scale + chunk.b * HD;
      for_each_masked(rows, [&](int n) { fill_zero(y + (chunk.token + n) * HD, HD); });
      if constexpr (kBlock != 1) {
        const int64_t token = chunk.token;
        const Multipliers<S> by = {factors + chunk.b * per_sequence, nullptr, inverses + chunk.b * HD * kBlock, nullptr};
        shrink_tokens(blocks, work, w + token * HD, rows, pi + token * H, mass + chunk.b * H, by, y + token * HD);
        continue;
      }
      for (int k = 0; k < rows.count; ++k) {
        const int64_t n = chunk.row(k);
        for (int64_t h = 0; h < H; ++h) {
          const S p = -pi[n * H + h];
          const int64_t at = n * HD + h * D;
#pragma omp simd
          for (int64_t d = 0; d < D; ++d) y[at + d] = store<T>(p * load(w[at + d]) * g[h * D + d]);
        }
      }
    }
  }
  return tost::kDone;
}

// With o = dy:
//   dA = g^2 sum_n(o pi w) / m        dM = -sum_d dA A / m
//   dpi = sum_d w (w dA - o g) + dM   dl = softmax backward      de = t dl      dt = sum_n dl e
//   ds = -q / s sum_n w^2 de          dw = -o pi g + 2 w (pi dA + q de + ds)
//
// With blocks dA = m (m I + A)^{-1} sum_n(pi sym(o w^T)) (m I + A)^{-1}, held as a gradient of products; d = 1..D of the
// sums above become blocks, g w becomes m (m I + A)^{-1} w, and 2 w dA becomes what dA is to w.
template <class T, int kWidth, int kBlock>
int tssa_backward(const tost::Backward& call) {
  using S = compute_t<T>;
  const Layout layout(call.shape, call.sequences, call.cu_seqlens, tost::kChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const int64_t B = call.sequences, tokens = call.shape.B * call.shape.N, items = layout.items, H = call.shape.H;
  const int64_t D = kWidth ? kWidth : call.shape.D, HD = H * D;
  const auto w = static_cast<const T*>(call.w), o = static_cast<const T*>(call.dy);
  const auto t = static_cast<const S*>(call.temperature), pi = static_cast<const S*>(call.pi);
  const auto squares = static_cast<const S*>(call.squares), weighted = static_cast<const S*>(call.weighted);
  const auto mass = static_cast<const S*>(call.mass);
  const auto dw = static_cast<T*>(call.dw);
  const auto dt = static_cast<S*>(call.dtemperature);
  const int threads = useful_threads(call.threads, items, tokens * HD);

  const Blocks<S, kBlock> blocks(H, D, call.form.block_size);
  const int64_t HP = H * blocks.width, per_sequence = kBlock == 1 ? 0 : blocks.tiles * blocks.pairs;
  const int64_t rows_H = kBlock == 1 ? H : tost::kChunk * H;
  const int64_t per_thread = HP + 2 * rows_H, per_work = BlockWork<S, kBlock>::count(blocks);

  Buffer<double> parts(items * HP), dt_parts(items * H);
  Buffer<S> q(B * HD), g(B * HD), dA(B * HP), dM(B * H), ds(B * HD), de(tokens * H);
  Buffer<S> scratch(threads * per_thread);
  Buffer<Lanes<S>> factors(B * per_sequence), reaches(B * per_sequence), works(threads * per_work);
  Buffer<S> inverses(kBlock > 1 ? B * HD * kBlock : 0), through(kBlock > 1 ? B * HD * kBlock : 0);
  if (layout.failed() || parts.failed() || dt_parts.failed() || q.failed() || g.failed() || dA.failed() ||
      dM.failed() || ds.failed() || de.failed() || factors.failed() || reaches.failed() || inverses.failed() ||
      through.failed() || scratch.failed() || works.failed())
    return tost::kNoMemory;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const sum = scratch + thread_index() * per_thread;
    S* const dpi = sum + HP;
    S* const energy = dpi + rows_H;
    const BlockWork<S, kBlock> work(blocks, works + thread_index() * per_work);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const Rows& rows = chunk.rows;
      fill_zero(sum, HP);
      if constexpr (kBlock == 1) {
        for (int k = 0; k < rows.count; ++k) {
          const int64_t n = chunk.row(k);
          for (int64_t h = 0; h < H; ++h) {
            const S p = pi[n * H + h];
            const int64_t at = n * HD + h * D;
#pragma omp simd
            for (int64_t d = 0; d < D; ++d) sum[h * D + d] += p * (S(load(o[at + d])) * load(w[at + d]));
          }
        }
      } else {
        const int64_t token = chunk.token;
        sum_symmetric(blocks, work, w + token * HD, o + token * HD, rows, pi + token * H, sum);
      }
      widen(sum, HP, parts + item * HP);
    }
    total_over_chunks(layout, parts + 0, HP, dA + 0);
    if constexpr (kBlock != 1) {
      factor_tiles(blocks, work, B, mass, weighted, factors + 0);
      if constexpr (kBlock > 0) invert_tiles(blocks, B, mass, factors + 0, inverses + 0);
      reach_tiles(blocks, work, B, mass, weighted, factors + 0, dA + 0, reaches + 0, dM + 0);
      if constexpr (kBlock > 0) spread_reaches(blocks, B, reaches + 0, through + 0);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < B * H; ++i) {
      const S m = mass[i] + S(kMassFloor);
      S dm = 0;
      for (int64_t j = i * D; j < (i + 1) * D; ++j) {
        q[j] = call.form.normalize ? inverse_square_sum(squares[j]) : S(1);
        if constexpr (kBlock != 1) continue;
        g[j] = m / (m + weighted[j]);
        dA[j] = g[j] * g[j] * dA[j] / m;
        dm -= dA[j] * weighted[j] / m;
      }
      if constexpr (kBlock == 1) dM[i] = dm;
    }

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const Rows& rows = chunk.rows;
      const int64_t b = chunk.b;
      const S *const qb = q + b * HD, *const gb = g + b * HD, *const dAb = dA + b * HD, *const dMb = dM + b * H;
      fill_zero(sum, HD);
      for (int64_t h = 0; h < H; ++h) dt_parts[item * H + h] = 0;
      if constexpr (kBlock != 1) {
        const int64_t token = chunk.token;
        const Multipliers<S> by = {factors + b * per_sequence, reaches + b * per_sequence, inverses + b * HD * kBlock,
                                   through + b * HD * kBlock};
        descend_tokens(blocks, work, w + token * HD, o + token * HD, rows, pi + token * H, mass + b * H, by, dpi,
                       dw + token * HD);
        energies<T, kWidth>(w + token * HD, rows, H, D, qb, energy);
      }
      for (int k = 0; k < rows.count; ++k) {
        const int64_t n = chunk.row(k);
        S* const slopes = kBlock == 1 ? dpi : dpi + k * H;
        S* const shares = kBlock == 1 ? energy : energy + k * H;
        for (int64_t h = 0; h < H; ++h) {
          if constexpr (kBlock != 1) {
            slopes[h] += dMb[h];
            continue;
          }
          const int64_t at = n * HD + h * D;
          S slope = 0, e = 0;
#pragma omp simd reduction(+ : slope, e)
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]), xx = x * x;
            slope += xx * dAb[h * D + d] - x * load(o[at + d]) * gb[h * D + d];
            e += xx * qb[h * D + d];
          }
          slopes[h] = slope + dMb[h];
          shares[h] = e;
        }
        softmax_backward(slopes, pi + n * H, H);
        for (int64_t h = 0; h < H; ++h) {
          dt_parts[item * H + h] += slopes[h] * shares[h];
          const S slope = t[h] * slopes[h];
          de[n * H + h] = slope;
          const int64_t at = n * HD + h * D;
#pragma omp simd
          for (int64_t d = 0; d < D; ++d) sum[h * D + d] += slope * (S(load(w[at + d])) * load(w[at + d]));
        }
      }
      widen(sum, HD, parts + item * HD);
    }
    total_over_chunks(layout, parts + 0, HD, ds + 0);
#pragma omp for schedule(static)
    for (int64_t j = 0; j < B * HD; ++j) {
      const bool flows = call.form.normalize && squares[j] > S(kSquareFloor);
      ds[j] = flows ? -inverse_square_sum(squares[j]) * (q[j] * ds[j]) : S(0);  // q * q may leave the range of float
    }

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const Rows& rows = chunk.rows;
      const int64_t b = chunk.b;
      const S *const qb = q + b * HD, *const gb = g + b * HD, *const dAb = dA + b * HD, *const dsb = ds + b * HD;
      for_each_masked(rows, [&](int n) { fill_zero(dw + (chunk.token + n) * HD, HD); });
      for (int k = 0; k < rows.count; ++k) {
        const int64_t n = chunk.row(k);
        for (int64_t h = 0; h < H; ++h) {
          const S p = pi[n * H + h], slope = de[n * H + h];
          const int64_t at = n * HD + h * D;
          if constexpr (kBlock != 1) {
#pragma omp simd
            for (int64_t d = 0; d < D; ++d) dw[at + d] += S(2) * w[at + d] * (slope * qb[h * D + d] + dsb[h * D + d]);
            continue;
          }
#pragma omp simd
          for (int64_t d = 0; d < D; ++d) {
            const int64_t j = h * D + d;
            const S through_sums = p * dAb[j] + slope * qb[j] + dsb[j];
            dw[at + d] = store<T>(S(2) * load(w[at + d]) * through_sums - p * load(o[at + d]) * gb[j]);
          }
        }
      }
    }
#pragma omp for schedule(static)
    for (int64_t h = 0; h < H; ++h) {
      double total = 0;
      for (int64_t item = 0; item < items; ++item) total += dt_parts[item * H + h];
      dt[h] = S(total);
    }
  }
  return tost::kDone;
}

}  // namespace
