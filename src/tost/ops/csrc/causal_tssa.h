// Causal TSSA. As in tssa.h, but every sum runs over the tokens up to and including n, after the sums of the state:
//
//   c[n] = sum_{m<=n} w^2         e[n,h] = k[n,h] sum_d w^2 / max(c, 1e-12) + D bias[n,h]      pi = softmax_h(t e)
//   A[n] = sum_{m<=n} pi w^2      M[n] = sum_{m<=n} pi      m = M + 1e-8      g = m / (m + A)      y = -pi w g
//
// k, the scale, is 1 if there is none. With a decay a[h] the sums fade as tokens come: c[n] = a c[n-1] + w^2, and so on.
//
// A chunk of tokens is replayed from the sums at its start, one head at a time, so that the running sums of the chunk
// stay in the first cache. Chunks run in parallel; between passes their totals are scanned in order.
//
// Within a chunk a running sum starts at zero and is added to the chunk's start: the rounding errors of a long prefix
// do not pile up, and outputs up to n never depend on a token after n, bit for bit. What a chunk starts with fades by a
// power of a, from a table. Everything that decay needs is behind kDecay: without it the code is as if there were none.
#pragma once

#include "common.h"
#include "fading.h"
#include "tssa.h"

namespace {

constexpr double kPrefixFloor = 1e-12;

// Where one chunk finds its data. `starts` holds the sums at its start: squares [HD], weighted [HD], mass [H].
struct CausalChunk {
  int64_t b, first;  // batch entry, first token
  Rows rows;
  CausalChunk(const Shape& s, const uint8_t* mask, int64_t item, int64_t chunks)
      : b(item / chunks),
        first(item % chunks * tost::kCausalChunk),
        rows(mask, b, s.N, first, tost::kCausalChunk) {}
  int64_t token(const Shape& s, int k) const { return b * s.N + first + rows.index[k]; }
};

// D bias[n, h], the shift of a token's energy: the bias is added to each of the D features of a head.
template <class S>
inline S energy_shift(const Shape& s, const S* bias, int64_t bias_stride, const CausalChunk& chunk, int k, int64_t h) {
  return bias ? S(s.D) * bias[chunk.b * bias_stride + (chunk.first + chunk.rows.index[k]) * s.H + h] : S(0);
}

// What a token's energy is multiplied by before its shift is added.
template <class S>
inline S energy_scale(const Shape& s, const S* scale, int64_t stride, const CausalChunk& chunk, int k, int64_t h) {
  return scale ? scale[chunk.b * stride + (chunk.first + chunk.rows.index[k]) * s.H + h] : S(1);
}

// energy[k, h] = sum_d w^2 / max(c, floor) along one head; run is D numbers of scratch.
template <class T, int kWidth, bool kDecay, class S>
inline void causal_energies(const Shape& s, const T* w, const CausalChunk& chunk, int64_t h, const S* start,
                            const S* power, S* run, S* energy) {
  const int64_t D = kWidth ? kWidth : s.D, HD = s.H * D;
  fill_zero(run, D);
  for (int k = 0; k < chunk.rows.count; ++k) {
    const T* row = w + chunk.token(s, k) * HD + h * D;
    S sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < D; ++d) {
      const S x = load(row[d]), xx = x * x;
      run[d] = faded<kDecay>(run[d], power, 1) + xx;
      const S c = faded<kDecay>(start[d], power, k + 1) + run[d];
      sum += xx / (c > S(kPrefixFloor) ? c : S(kPrefixFloor));
    }
    energy[k * s.H + h] = sum;
  }
}

template <class T, int kWidth, bool kDecay>
int causal_forward_as(const tost::CausalForward& call) {
  using S = compute_t<T>;
  const Shape s = call.shape;
  const int64_t B = s.B, N = s.N, H = s.H, D = kWidth ? kWidth : s.D, HD = H * D, stride = 2 * HD + H;
  const int64_t chunks = (N + tost::kCausalChunk - 1) / tost::kCausalChunk, items = B * chunks;
  const auto w = static_cast<const T*>(call.w);
  const auto t = static_cast<const S*>(call.temperature), bias = static_cast<const S*>(call.bias);
  const auto scale = static_cast<const S*>(call.scale);
  const auto y = static_cast<T*>(call.y);
  const int threads = useful_threads(call.threads, items, B * N * HD);

  Buffer<double> parts(items * HD), mass_parts(items * H);
  Buffer<S> scratch(threads * (HD + tost::kCausalChunk * H));
  Buffer<S> own(call.pi ? 0 : B * N * H + items * stride);
  const Fading<S, kDecay> fading(static_cast<const S*>(call.decay), H, call.mask, B, N, chunks);
  if (parts.failed() || mass_parts.failed() || scratch.failed() || own.failed() || fading.failed()) return 1;
  S* const pi = call.pi ? static_cast<S*>(call.pi) : own + 0;
  S* const starts = call.pi ? static_cast<S*>(call.starts) : pi + B * N * H;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const run = scratch + thread_index() * (HD + tost::kCausalChunk * H);
    S* const row_pi = run + HD;

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const CausalChunk chunk(s, call.mask, item, chunks);
      fill_zero(run, HD);
      if constexpr (kDecay)
        add_fading_squares<T, kWidth>(w + (chunk.b * N + chunk.first) * HD, chunk.rows, H, D, fading, run);
      else
        add_squares(w + (chunk.b * N + chunk.first) * HD, chunk.rows, HD, run);
      widen(run, HD, parts + item * HD);
    }
    carry_over_chunks(fading, parts + 0, B, chunks, H, D, false, static_cast<const S*>(call.squares_in), starts, stride,
                      static_cast<S*>(call.squares));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const CausalChunk chunk(s, call.mask, item, chunks);
      S* const out = pi + (chunk.b * N + chunk.first) * H;
      for (int64_t h = 0; h < H; ++h)
        causal_energies<T, kWidth, kDecay>(s, w, chunk, h, starts + item * stride + h * D, fading.of(h), run, row_pi);
      for (int64_t h = 0; h < H; ++h) mass_parts[item * H + h] = 0;
      for_each_masked(chunk.rows, [&](int n) { fill_zero(out + n * H, H); });
      for (int k = 0; k < chunk.rows.count; ++k) {
        for (int64_t h = 0; h < H; ++h) {
          S& logit = row_pi[k * H + h];
          logit *= energy_scale(s, scale, call.scale_stride, chunk, k, h);
          logit = t[h] * (logit + energy_shift(s, bias, call.bias_stride, chunk, k, h));
        }
      }
      softmax_rows(row_pi, chunk.rows.count, H);
      for (int k = 0; k < chunk.rows.count; ++k) {
        for (int64_t h = 0; h < H; ++h) {
          out[chunk.rows.index[k] * H + h] = row_pi[k * H + h];
          double& mass_part = mass_parts[item * H + h];
          mass_part = faded<kDecay>(mass_part, fading.of(h), 1) + row_pi[k * H + h];
        }
      }
      fill_zero(run, HD);
      if constexpr (kDecay)
        add_fading_weighted_squares<T, kWidth>(w + (chunk.b * N + chunk.first) * HD, chunk.rows, H, D, row_pi, fading,
                                               run);
      else
        add_weighted_squares<T, kWidth>(w + (chunk.b * N + chunk.first) * HD, chunk.rows, H, D, row_pi, run);
      widen(run, HD, parts + item * HD);
    }
    carry_over_chunks(fading, parts + 0, B, chunks, H, D, false, static_cast<const S*>(call.weighted_in), starts + HD,
                      stride, static_cast<S*>(call.weighted));
    carry_over_chunks(fading, mass_parts + 0, B, chunks, H, 1, false, static_cast<const S*>(call.mass_in),
                      starts + 2 * HD, stride, static_cast<S*>(call.mass));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const CausalChunk chunk(s, call.mask, item, chunks);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(y + (chunk.b * N + chunk.first + n) * HD, HD); });
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + HD + h * D;
        const S mass_start = starts[item * stride + 2 * HD + h];
        const S* const power = fading.of(h);
        S mass_run = 0;
        fill_zero(run, D);
        for (int k = 0; k < chunk.rows.count; ++k) {
          const int64_t n = chunk.token(s, k), at = n * HD + h * D;
          const S p = pi[n * H + h];
          mass_run = faded<kDecay>(mass_run, power, 1) + p;
          const S m = faded<kDecay>(mass_start, power, k + 1) + mass_run + S(kMassFloor), pm = -p * m;
#pragma omp simd
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]);
            run[d] = faded<kDecay>(run[d], power, 1) + p * (x * x);
            y[at + d] = store<T>(pm * x / (m + (faded<kDecay>(start[d], power, k + 1) + run[d])));
          }
        }
      }
    }
  }
  return 0;
}

template <class T, int kWidth>
int causal_forward(const tost::CausalForward& call) {
  return call.decay ? causal_forward_as<T, kWidth, true>(call) : causal_forward_as<T, kWidth, false>(call);
}

}  // namespace
