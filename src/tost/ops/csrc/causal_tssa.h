// Causal TSSA. As in tssa.h, but every sum runs over the tokens up to and including n, after the sums of the state:
//
//   c[n] = sum_{m<=n} w^2         e[n,h] = sum_d w^2 / max(c, 1e-12) + D bias[n,h]      pi = softmax_h(t e)
//   A[n] = sum_{m<=n} pi w^2      M[n] = sum_{m<=n} pi      m = M + 1e-8      g = m / (m + A)      y = -pi w g
//
// A chunk of tokens is replayed from the sums at its start, one head at a time, so that the running sums of the chunk
// stay in the first cache. Chunks run in parallel; between passes their totals are scanned in order. `starts` holds, for
// each chunk, the sums at its start: squares [HD], weighted [HD], mass [H].
//
// Within a chunk a running sum starts at zero and is added to the chunk's start: the rounding errors of a long prefix
// do not pile up, and outputs up to n never depend on a token after n, bit for bit.
#pragma once

#include "common.h"
#include "tssa.h"

namespace {

// D bias[n, h], the shift of a token's energy: the bias is added to each of the D features of a head.
template <class S>
inline S energy_shift(const Shape& s, const S* bias, int64_t bias_stride, const Chunk& chunk, int k, int64_t h) {
  return bias ? S(s.D) * bias[chunk.b * bias_stride + (chunk.column + chunk.rows.index[k]) * s.H + h] : S(0);
}

// energy[k, h] = sum_d w^2 / max(c, floor) along one head; run is D numbers of scratch.
template <class T, int kWidth, class S>
inline void causal_energies(const Shape& s, const T* w, const Chunk& chunk, int64_t h, const S* start,
                            S* run, S* energy) {
  const int64_t D = kWidth ? kWidth : s.D, HD = s.H * D;
  fill_zero(run, D);
  for (int k = 0; k < chunk.rows.count; ++k) {
    const T* row = w + chunk.row(k) * HD + h * D;
    S sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < D; ++d) {
      const S x = load(row[d]), xx = x * x;
      run[d] = run[d] + xx;
      const S c = start[d] + run[d];
      sum += xx / (c > S(kPrefixFloor) ? c : S(kPrefixFloor));
    }
    energy[k * s.H + h] = sum;
  }
}

template <class T, int kWidth>
int causal_forward(const tost::CausalForward& call) {
  using S = compute_t<T>;
  const Shape s = call.shape;
  const Layout layout(s, call.sequences, call.cu_seqlens, tost::kCausalChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const int64_t tokens = s.B * s.N, items = layout.items, H = s.H, D = kWidth ? kWidth : s.D, HD = H * D;
  const int64_t stride = 2 * HD + H;
  const auto w = static_cast<const T*>(call.w);
  const auto t = static_cast<const S*>(call.temperature), bias = static_cast<const S*>(call.bias);
  const auto y = static_cast<T*>(call.y);
  const int threads = useful_threads(call.threads, items, tokens * HD);

  const int64_t per_thread = HD + tost::kCausalChunk * H;

  Buffer<double> parts(items * HD), mass_parts(items * H);
  Buffer<S> scratch(threads * per_thread);
  Buffer<S> own(call.pi ? 0 : tokens * H + items * stride);
  if (layout.failed() || parts.failed() || mass_parts.failed() || scratch.failed() || own.failed())
    return tost::kNoMemory;
  S* const pi = call.pi ? static_cast<S*>(call.pi) : own + 0;
  S* const starts = call.pi ? static_cast<S*>(call.starts) : pi + tokens * H;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const run = scratch + thread_index() * per_thread;
    S* const row_pi = run + HD;

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      fill_zero(run, HD);
      add_squares(w + chunk.token * HD, chunk.rows, HD, run);
      widen(run, HD, parts + item * HD);
    }
    scan_over_chunks(layout, parts + 0, HD, false, static_cast<const S*>(call.squares_in), starts, stride,
                      static_cast<S*>(call.squares));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      S* const out = pi + chunk.token * H;
      for (int64_t h = 0; h < H; ++h)
        causal_energies<T, kWidth>(s, w, chunk, h, starts + item * stride + h * D, run, row_pi);
      for (int64_t h = 0; h < H; ++h) mass_parts[item * H + h] = 0;
      for_each_masked(chunk.rows, [&](int n) { fill_zero(out + n * H, H); });
      for (int k = 0; k < chunk.rows.count; ++k) {
        for (int64_t h = 0; h < H; ++h) {
          S& logit = row_pi[k * H + h];
          logit = t[h] * (logit + energy_shift(s, bias, call.bias_stride, chunk, k, h));
        }
      }
      softmax_rows(row_pi, chunk.rows.count, H);
      for (int k = 0; k < chunk.rows.count; ++k) {
        for (int64_t h = 0; h < H; ++h) {
          out[chunk.rows.index[k] * H + h] = row_pi[k * H + h];
          double& mass_part = mass_parts[item * H + h];
          mass_part = mass_part + row_pi[k * H + h];
        }
      }
      fill_zero(run, HD);
      add_weighted_squares<T, kWidth>(w + chunk.token * HD, chunk.rows, H, D, row_pi, run);
      widen(run, HD, parts + item * HD);
    }
    scan_over_chunks(layout, parts + 0, HD, false, static_cast<const S*>(call.weighted_in), starts + HD,
                      stride, static_cast<S*>(call.weighted));
    scan_over_chunks(layout, mass_parts + 0, H, false, static_cast<const S*>(call.mass_in),
                      starts + 2 * HD, stride, static_cast<S*>(call.mass));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(y + (chunk.token + n) * HD, HD); });
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + HD + h * D;
        const S mass_start = starts[item * stride + 2 * HD + h];
        S mass_run = 0;
        fill_zero(run, D);
        for (int k = 0; k < chunk.rows.count; ++k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S p = pi[n * H + h];
          mass_run = mass_run + p;
          const S m = mass_start + mass_run + S(kMassFloor), pm = -p * m;
#pragma omp simd
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]);
            run[d] = run[d] + p * (x * x);
            y[at + d] = store<T>(pm * x / (m + (start[d] + run[d])));
          }
        }
      }
    }
  }
  return tost::kDone;
}

// The backward pass: three passes over w and dy, each parallel over chunks that are replayed.

// The sums A and M of one head for every real token of a chunk, replayed from the chunk's start into A [rows, D], m.
template <class T, int kWidth, class S>
inline void replay_weighted(const Shape& s, const T* w, const S* pi, const Chunk& chunk, int64_t h,
                            const S* start, S mass_start, S* run, S* A, S* m) {
  const int64_t D = kWidth ? kWidth : s.D;
  S mass_run = 0;
  fill_zero(run, D);
  for (int k = 0; k < chunk.rows.count; ++k) {
    const int64_t n = chunk.row(k), at = (n * s.H + h) * D;
    const S p = pi[n * s.H + h];
    mass_run = mass_run + p;
    m[k] = mass_start + mass_run + S(kMassFloor);
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const S x = load(w[at + d]);
      run[d] = run[d] + p * (x * x);
      A[k * D + d] = start[d] + run[d];
    }
  }
}

template <class T, int kWidth, class S>
inline void replay_squares(const Shape& s, const T* w, const Chunk& chunk, int64_t h, const S* start,
                           S* run, S* c) {
  const int64_t D = kWidth ? kWidth : s.D;
  fill_zero(run, D);
  for (int k = 0; k < chunk.rows.count; ++k) {
    const int64_t at = (chunk.row(k) * s.H + h) * D;
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const S x = load(w[at + d]);
      run[d] = run[d] + x * x;
      c[k * D + d] = start[d] + run[d];
    }
  }
}

// With o = dy, and sums over m >= n written with a bar:
//   r[n] = g^2 o pi w / m            Ā[n] = dA_out + sum r        M̄[n] = dM_out - sum_n sum_d r A / m
//   dpi = sum_d w (w Ā - o g) + M̄    dl = softmax backward       de = t dl      dt = sum dl e      dbias = D de
//   u[n] = -w^2 de / c^2             c̄[n] = dc_out + sum u        dw = -o pi g + 2 w (pi Ā + de / c + c̄)
// Pass 1 totals r per chunk, pass 2 finds de and the first part of dw and totals u, pass 3 adds the rest of dw.
template <class T, int kWidth>
int causal_backward(const tost::CausalBackward& call) {
  using S = compute_t<T>;
  const Shape s = call.shape;
  const Layout layout(s, call.sequences, call.cu_seqlens, tost::kCausalChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const int64_t tokens = s.B * s.N, items = layout.items, H = s.H, D = kWidth ? kWidth : s.D, HD = H * D;
  const int64_t stride = 2 * HD + H;
  constexpr bool kExact = sizeof(T) == sizeof(S);  // dw can hold its own first part without rounding
  const auto w = static_cast<const T*>(call.w), o = static_cast<const T*>(call.dy);
  const auto t = static_cast<const S*>(call.temperature), bias = static_cast<const S*>(call.bias);
  const auto pi = static_cast<const S*>(call.pi), starts = static_cast<const S*>(call.starts);
  const auto dw = static_cast<T*>(call.dw);
  const auto dt = static_cast<S*>(call.dtemperature), de = static_cast<S*>(call.denergy);
  const int threads = useful_threads(call.threads, items, tokens * HD);
  const int64_t per_thread = D * (2 + tost::kCausalChunk) + tost::kCausalChunk * (1 + H);

  Buffer<double> parts(items * HD), mass_parts(items * H), dt_parts(items * H);
  Buffer<S> tails(items * HD), mass_tails(items * H), first_part(kExact ? 0 : tokens * HD);
  Buffer<S> scratch(threads * per_thread);
  if (layout.failed() || parts.failed() || mass_parts.failed() || dt_parts.failed() || tails.failed() ||
      mass_tails.failed() || first_part.failed() || scratch.failed())
    return tost::kNoMemory;
  S* const partial = kExact ? static_cast<S*>(call.dw) : first_part + 0;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const run = scratch + thread_index() * per_thread;
    S* const tail = run + D;
    S* const replay = tail + D;                    // [rows, D]
    S* const m = replay + tost::kCausalChunk * D;  // [rows]
    S* const slope = m + tost::kCausalChunk;       // [rows, H]: dpi, then dl

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + HD + h * D;
        const S mass_start = starts[item * stride + 2 * HD + h];
        S mass_run = 0;
        double mass_total = 0;
        fill_zero(run, D);
        fill_zero(tail, D);
        for (int k = 0; k < chunk.rows.count; ++k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S p = pi[n * H + h];
          mass_run = mass_run + p;
          const S mk = mass_start + mass_run + S(kMassFloor);
          const S inverse = S(1) / mk, factor = p * mk;
          S dm = 0;
#pragma omp simd reduction(+ : dm)
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]);
            run[d] = run[d] + p * (x * x);
            const S A = start[d] + run[d], f = S(1) / (mk + A);
            const S r = factor * f * f * (x * load(o[at + d]));
            tail[d] += r;
            dm -= r * A * inverse;
          }
          mass_total += dm;
        }
        widen(tail, D, parts + item * HD + h * D);
        mass_parts[item * H + h] = mass_total;
      }
    }
    scan_over_chunks(layout, parts + 0, HD, true, static_cast<const S*>(call.dweighted), tails + 0, HD,
                      static_cast<S*>(call.dweighted_in));
    scan_over_chunks(layout, mass_parts + 0, H, true, static_cast<const S*>(call.dmass), mass_tails + 0,
                      H, static_cast<S*>(call.dmass_in));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const int count = chunk.rows.count;
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + HD + h * D;
        const S mass_start = starts[item * stride + 2 * HD + h];
        replay_weighted<T, kWidth>(s, w, pi, chunk, h, start, mass_start, run, replay, m);
        const S* const later = tails + item * HD + h * D;
        const S mass_later = mass_tails[item * H + h];
        S mass_run = 0;
        fill_zero(tail, D);
        for (int k = count - 1; k >= 0; --k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S p = pi[n * H + h], mk = m[k], inverse = S(1) / mk, factor = p * mk;
          S dm = 0, dpi = 0;
#pragma omp simd reduction(+ : dm, dpi)
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]), ox = load(o[at + d]);
            const S A = replay[k * D + d], f = S(1) / (mk + A), g = mk * f;
            const S r = factor * f * f * (x * ox);
            tail[d] = tail[d] + r;
            dm -= r * A * inverse;
            const S bar = later[d] + tail[d];
            dpi += x * (x * bar - ox * g);
            partial[at + d] = p * (S(2) * x * bar - ox * g);
          }
          mass_run = mass_run + dm;
          const S mass_bar = mass_later + mass_run;
          slope[k * H + h] = dpi + mass_bar;
        }
      }
      for_each_masked(chunk.rows, [&](int n) {
        fill_zero(de + (chunk.token + n) * H, H);
      });
      for (int k = 0; k < count; ++k) {
        const int64_t n = chunk.row(k);
        softmax_backward(slope + k * H, pi + n * H, H);
        for (int64_t h = 0; h < H; ++h) de[n * H + h] = t[h] * slope[k * H + h];
      }
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + h * D;
        fill_zero(run, D);
        fill_zero(tail, D);
        double dt_total = 0;
        for (int k = 0; k < count; ++k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S dn = de[n * H + h];
          S e = 0;
#pragma omp simd reduction(+ : e)
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]), xx = x * x;
            run[d] = run[d] + xx;
            const S c = start[d] + run[d];
            const S share = xx / (c > S(kPrefixFloor) ? c : S(kPrefixFloor));
            e += share;
            tail[d] -= c > S(kPrefixFloor) ? dn * share / c : S(0);
          }
          dt_total += slope[k * H + h] * (e + energy_shift(s, bias, call.bias_stride, chunk, k, h));
        }
        widen(tail, D, parts + item * HD + h * D);
        dt_parts[item * H + h] = dt_total;
      }
    }
    scan_over_chunks(layout, parts + 0, HD, true, static_cast<const S*>(call.dsquares), tails + 0, HD,
                      static_cast<S*>(call.dsquares_in));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(dw + (chunk.token + n) * HD, HD); });
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + h * D;
        replay_squares<T, kWidth>(s, w, chunk, h, start, run, replay);
        const S* const later = tails + item * HD + h * D;
        fill_zero(tail, D);
        for (int k = chunk.rows.count - 1; k >= 0; --k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S dn = de[n * H + h];
#pragma omp simd
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]), c = replay[k * D + d];
            const S inverse = S(1) / (c > S(kPrefixFloor) ? c : S(kPrefixFloor));
            const S u = c > S(kPrefixFloor) ? dn * (x * inverse) * (x * inverse) : S(0);
            tail[d] = tail[d] - u;
            const S bar = later[d] + tail[d];
            dw[at + d] = store<T>(partial[at + d] + S(2) * x * (dn * inverse + bar));
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
