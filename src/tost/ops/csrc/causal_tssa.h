// Causal TSSA. As in tssa.h, but every sum runs over the tokens up to and including n, after the sums of the state:
//
//   c[n] = sum_{m<=n} w^2         e[n,h] = k[n,h] sum_d w^2 / max(c, 1e-12) + D bias[n,h]      pi = softmax_h(t e)
//   A[n] = sum_{m<=n} pi w^2      M[n] = sum_{m<=n} pi      m = M + 1e-8      g = m / (m + A)      y = -pi w g
//
// k, the scale, is 1 if there is none. With a decay a[h] the sums fade as tokens come: c[n] = a c[n-1] + w^2, and so on.
//
// A chunk of tokens is replayed from the sums at its start, one head at a time, so that the running sums of the chunk
// stay in the first cache. Chunks run in parallel; between passes their totals are scanned in order. `starts` holds, for
// each chunk, the sums at its start: squares [HD], weighted [HP], mass [H], with HP = HD unless statistics are in blocks.
//
// Within a chunk a running sum starts at zero and is added to the chunk's start: the rounding errors of a long prefix
// do not pile up, and outputs up to n never depend on a token after n, bit for bit. What a chunk starts with fades by a
// power of a, from a table. Everything that decay needs depends on kDecay: without it the code is as if there were none.
#pragma once

#include "causal_block.h"
#include "common.h"
#include "fading.h"
#include "tssa.h"

namespace {

// D bias[n, h], the shift of a token's energy: the bias is added to each of the D features of a head.
template <class S>
inline S energy_shift(const Shape& s, const S* bias, int64_t bias_stride, const Chunk& chunk, int k, int64_t h) {
  return bias ? S(s.D) * bias[chunk.b * bias_stride + (chunk.column + chunk.rows.index[k]) * s.H + h] : S(0);
}

// What a token's energy is multiplied by before its shift is added.
template <class S>
inline S energy_scale(const Shape& s, const S* scale, int64_t stride, const Chunk& chunk, int k, int64_t h) {
  return scale ? scale[chunk.b * stride + (chunk.column + chunk.rows.index[k]) * s.H + h] : S(1);
}

// energy[k, h] = sum_d w^2 / max(c, floor) along one head; run is D numbers of scratch.
template <class T, int kWidth, bool kDecay, class S>
inline void causal_energies(const Shape& s, const T* w, const Chunk& chunk, int64_t h, const S* start,
                            const S* power, S* run, S* energy) {
  const int64_t D = kWidth ? kWidth : s.D, HD = s.H * D;
  fill_zero(run, D);
  for (int k = 0; k < chunk.rows.count; ++k) {
    const T* row = w + chunk.row(k) * HD + h * D;
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

template <class T, int kWidth, int kBlock, bool kDecay>
int causal_forward_as(const tost::CausalForward& call) {
  using S = compute_t<T>;
  const Shape s = call.shape;
  const Layout layout(s, call.sequences, call.cu_seqlens, tost::kCausalChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const int64_t tokens = s.B * s.N, items = layout.items, H = s.H, D = kWidth ? kWidth : s.D, HD = H * D;
  const Blocks<S, kBlock> blocks(H, D, call.form.block_size);
  const int64_t P = kBlock == 1 ? D : blocks.width, HP = H * P, stride = HD + HP + H;
  const auto w = static_cast<const T*>(call.w);
  const auto t = static_cast<const S*>(call.temperature), bias = static_cast<const S*>(call.bias);
  const auto scale = static_cast<const S*>(call.scale);
  const auto decay = static_cast<const S*>(call.decay);
  const auto y = static_cast<T*>(call.y);
  const int threads = useful_threads(call.threads, items, tokens * HD);

  const int64_t per_thread = HP + 2 * tost::kCausalChunk * H, per_work = BlockWork<S, kBlock>::count(blocks);

  Buffer<double> parts(items * HP), mass_parts(items * H);
  Buffer<S> scratch(threads * per_thread);
  Buffer<Lanes<S>> works(threads * per_work);
  Buffer<S> own(call.pi ? 0 : tokens * H + items * stride);
  const Fading<S, kDecay> fading(static_cast<const S*>(call.decay), H, call.mask, layout);
  if (layout.failed() || parts.failed() || mass_parts.failed() || scratch.failed() || works.failed() ||
      own.failed() || fading.failed())
    return tost::kNoMemory;
  S* const pi = call.pi ? static_cast<S*>(call.pi) : own + 0;
  S* const starts = call.pi ? static_cast<S*>(call.starts) : pi + tokens * H;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const run = scratch + thread_index() * per_thread;
    S* const row_pi = run + HP;
    S* const masses = row_pi + tost::kCausalChunk * H;
    const BlockWork<S, kBlock> work(blocks, works + thread_index() * per_work);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      fill_zero(run, HD);
      if constexpr (kDecay)
        add_fading_squares<T, kWidth>(w + chunk.token * HD, chunk.rows, H, D, fading, run);
      else
        add_squares(w + chunk.token * HD, chunk.rows, HD, run);
      widen(run, HD, parts + item * HD);
    }
    carry_over_chunks(layout, fading, parts + 0, H, D, false, static_cast<const S*>(call.squares_in), starts, stride,
                      static_cast<S*>(call.squares));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      S* const out = pi + chunk.token * H;
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
      fill_zero(run, HP);
      if constexpr (kBlock != 1)
        sum_products(blocks, work, w + chunk.token * HD, chunk.rows, row_pi, decay, run);
      else if constexpr (kDecay)
        add_fading_weighted_squares<T, kWidth>(w + chunk.token * HD, chunk.rows, H, D, row_pi, fading, run);
      else
        add_weighted_squares<T, kWidth>(w + chunk.token * HD, chunk.rows, H, D, row_pi, run);
      widen(run, HP, parts + item * HP);
    }
    carry_over_chunks(layout, fading, parts + 0, H, P, false, static_cast<const S*>(call.weighted_in), starts + HD,
                      stride, static_cast<S*>(call.weighted));
    carry_over_chunks(layout, fading, mass_parts + 0, H, 1, false, static_cast<const S*>(call.mass_in),
                      starts + HD + HP, stride, static_cast<S*>(call.mass));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(y + (chunk.token + n) * HD, HD); });
      if constexpr (kBlock != 1) {
        const int64_t token = chunk.token;
        const S* const start = starts + item * stride + HD;
        replay_masses(H, chunk.rows, pi + token * H, start + HP, fading, masses);
        shrink_causally(blocks, work, w + token * HD, chunk.rows, pi + token * H, masses, start, decay, y + token * HD);
        continue;
      }
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + HD + h * D;
        const S mass_start = starts[item * stride + 2 * HD + h];
        const S* const power = fading.of(h);
        S mass_run = 0;
        fill_zero(run, D);
        for (int k = 0; k < chunk.rows.count; ++k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
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
  return tost::kDone;
}

template <class T, int kWidth, int kBlock>
int causal_forward(const tost::CausalForward& call) {
  return call.decay ? causal_forward_as<T, kWidth, kBlock, true>(call)
                    : causal_forward_as<T, kWidth, kBlock, false>(call);
}

// The backward pass: three passes over w and dy, each parallel over chunks that are replayed.

// The sums A and M of one head for every real token of a chunk, replayed from the chunk's start into A [rows, D], m.
template <class T, int kWidth, bool kDecay, class S>
inline void replay_weighted(const Shape& s, const T* w, const S* pi, const Chunk& chunk, int64_t h,
                            const S* start, S mass_start, const S* power, S* run, S* A, S* m) {
  const int64_t D = kWidth ? kWidth : s.D;
  S mass_run = 0;
  fill_zero(run, D);
  for (int k = 0; k < chunk.rows.count; ++k) {
    const int64_t n = chunk.row(k), at = (n * s.H + h) * D;
    const S p = pi[n * s.H + h];
    mass_run = faded<kDecay>(mass_run, power, 1) + p;
    m[k] = faded<kDecay>(mass_start, power, k + 1) + mass_run + S(kMassFloor);
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const S x = load(w[at + d]);
      run[d] = faded<kDecay>(run[d], power, 1) + p * (x * x);
      A[k * D + d] = faded<kDecay>(start[d], power, k + 1) + run[d];
    }
  }
}

template <class T, int kWidth, bool kDecay, class S>
inline void replay_squares(const Shape& s, const T* w, const Chunk& chunk, int64_t h, const S* start,
                           const S* power, S* run, S* c) {
  const int64_t D = kWidth ? kWidth : s.D;
  fill_zero(run, D);
  for (int k = 0; k < chunk.rows.count; ++k) {
    const int64_t at = (chunk.row(k) * s.H + h) * D;
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const S x = load(w[at + d]);
      run[d] = faded<kDecay>(run[d], power, 1) + x * x;
      c[k * D + d] = faded<kDecay>(start[d], power, k + 1) + run[d];
    }
  }
}

// With o = dy, and sums over m >= n written with a bar:
//   r[n] = g^2 o pi w / m            Ā[n] = dA_out + sum r        M̄[n] = dM_out - sum_n sum_d r A / m
//   dpi = sum_d w (w Ā - o g) + M̄    dl = softmax backward       de = t dl      dt = sum dl e      dbias = D de
//   u[n] = -w^2 k de / c^2           c̄[n] = dc_out + sum u        dw = -o pi g + 2 w (pi Ā + k de / c + c̄)
//   dk = de sum_d w^2 / c
// With a decay a bar fades on its way back, Ā[n] = r[n] + a Ā[n+1], the gradient of a sum before the first token is
// a times the first bar, and da = sum_n sum_d (Ā[n] A[n-1] + c̄[n] c[n-1]) + M̄[n] M[n-1].
// Pass 1 totals r per chunk, pass 2 finds de and the first part of dw and totals u, pass 3 adds the rest of dw.
// With statistics in blocks r = p m sym(u z^T), where (m I + A) u = w and (m I + A) z = o: see causal_block.h.
template <class T, int kWidth, int kBlock, bool kDecay>
int causal_backward_as(const tost::CausalBackward& call) {
  using S = compute_t<T>;
  const Shape s = call.shape;
  const Layout layout(s, call.sequences, call.cu_seqlens, tost::kCausalChunk);
  if (!layout.valid()) return tost::kBadSequences;
  const int64_t tokens = s.B * s.N, items = layout.items, H = s.H, D = kWidth ? kWidth : s.D, HD = H * D;
  const Blocks<S, kBlock> blocks(H, D, call.form.block_size);
  const int64_t P = kBlock == 1 ? D : blocks.width, HP = H * P, stride = HD + HP + H;
  constexpr bool kExact = sizeof(T) == sizeof(S);  // dw can hold its own first part without rounding
  const auto w = static_cast<const T*>(call.w), o = static_cast<const T*>(call.dy);
  const auto t = static_cast<const S*>(call.temperature), bias = static_cast<const S*>(call.bias);
  const auto pi = static_cast<const S*>(call.pi), starts = static_cast<const S*>(call.starts);
  const auto scale = static_cast<const S*>(call.scale);
  const auto dw = static_cast<T*>(call.dw);
  const auto dt = static_cast<S*>(call.dtemperature), de = static_cast<S*>(call.denergy);
  const auto decay = static_cast<const S*>(call.decay);
  const auto dscale = scale ? static_cast<S*>(call.dscale) : nullptr;
  const int threads = useful_threads(call.threads, items, tokens * HD);
  const int64_t in_blocks = kBlock == 1 ? 0 : HP + 2 * tost::kCausalChunk * H + H;
  const int64_t per_thread =
      D * (2 + tost::kCausalChunk) + tost::kCausalChunk * (1 + H) + in_blocks;
  const int64_t per_work =
      BlockWork<S, kBlock>::count(blocks, tost::kCausalChunk, kDecay ? tost::kCausalChunk : 0);

  Buffer<double> parts(items * HP), mass_parts(items * H), dt_parts(items * H);
  Buffer<S> tails(items * HP), mass_tails(items * H), first_part(kExact ? 0 : tokens * HD);
  Buffer<S> scratch(threads * per_thread);
  Buffer<Lanes<S>> works(threads * per_work);
  Buffer<double> da_parts(kDecay ? items * H : 0);
  const Fading<S, kDecay> fading(static_cast<const S*>(call.decay), H, call.mask, layout);
  if (layout.failed() || parts.failed() || mass_parts.failed() || dt_parts.failed() || tails.failed() ||
      mass_tails.failed() || first_part.failed() || scratch.failed() || works.failed() || da_parts.failed() ||
      fading.failed())
    return tost::kNoMemory;
  S* const partial = kExact ? static_cast<S*>(call.dw) : first_part + 0;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    S* const run = scratch + thread_index() * per_thread;
    S* const tail = run + D;
    S* const replay = tail + D;                    // [rows, D]
    S* const m = replay + tost::kCausalChunk * D;  // [rows]
    S* const slope = m + tost::kCausalChunk;       // [rows, H]: dpi, then dl
    // In blocks only: sums [HP], masses and their gradients [rows, H], a number per head, and what tiles need.
    S* const sums = slope + tost::kCausalChunk * H;
    S* const masses = sums + (kBlock == 1 ? 0 : HP);
    S* const dmasses = masses + (kBlock == 1 ? 0 : tost::kCausalChunk * H);
    S* const of_heads = dmasses + (kBlock == 1 ? 0 : tost::kCausalChunk * H);
    const BlockWork<S, kBlock> work(blocks, works + thread_index() * per_work, tost::kCausalChunk);

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      if constexpr (kBlock != 1) {
        const int64_t token = chunk.token;
        const S* const start = starts + item * stride + HD;
        replay_masses(H, chunk.rows, pi + token * H, start + HP, fading, masses);
        reach_of_chunk(blocks, work, w + token * HD, o + token * HD, chunk.rows, pi + token * H, masses, start, decay,
                       fading, sums, of_heads);
        widen(sums, HP, parts + item * HP);
        widen(of_heads, H, mass_parts + item * H);
        continue;
      }
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + HD + h * D;
        const S mass_start = starts[item * stride + 2 * HD + h];
        const S* const power = fading.of(h);
        S mass_run = 0;
        double mass_total = 0;
        fill_zero(run, D);
        fill_zero(tail, D);
        for (int k = 0; k < chunk.rows.count; ++k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S p = pi[n * H + h];
          mass_run = faded<kDecay>(mass_run, power, 1) + p;
          const S mk = faded<kDecay>(mass_start, power, k + 1) + mass_run + S(kMassFloor);
          const S inverse = S(1) / mk, factor = p * mk;
          S dm = 0;
#pragma omp simd reduction(+ : dm)
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]);
            run[d] = faded<kDecay>(run[d], power, 1) + p * (x * x);
            const S A = faded<kDecay>(start[d], power, k + 1) + run[d], f = S(1) / (mk + A);
            const S r = factor * f * f * (x * load(o[at + d]));
            tail[d] += faded<kDecay>(r, power, k + 1);
            dm -= r * A * inverse;
          }
          mass_total += faded<kDecay>(dm, power, k + 1);
        }
        widen(tail, D, parts + item * HD + h * D);
        mass_parts[item * H + h] = mass_total;
      }
    }
    carry_over_chunks(layout, fading, parts + 0, H, P, true, static_cast<const S*>(call.dweighted), tails + 0, HP,
                      static_cast<S*>(call.dweighted_in));
    carry_over_chunks(layout, fading, mass_parts + 0, H, 1, true, static_cast<const S*>(call.dmass), mass_tails + 0,
                      H, static_cast<S*>(call.dmass_in));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      const int count = chunk.rows.count;
      if constexpr (kBlock != 1) {
        const int64_t token = chunk.token;
        const S* const start = starts + item * stride + HD;
        replay_masses(H, chunk.rows, pi + token * H, start + HP, fading, masses);
        descend_chunk(blocks, work, w + token * HD, o + token * HD, chunk.rows, pi + token * H, masses, start, decay,
                      tails + item * HP, slope, dmasses, partial + token * HD, kDecay ? of_heads : nullptr);
        for (int64_t h = 0; h < H; ++h) {
          S bar = mass_tails[item * H + h];
          double da_total = kDecay ? double(of_heads[h]) : 0;
          for (int k = count - 1; k >= 0; --k) {
            bar = (k < count - 1 ? faded<kDecay>(bar, fading.of(h), 1) : bar) + dmasses[k * H + h];
            slope[k * H + h] += bar;
            if constexpr (kDecay) da_total += bar * (k ? masses[(k - 1) * H + h] - S(kMassFloor) : start[HP + h]);
          }
          if constexpr (kDecay) da_parts[item * H + h] = da_total;
        }
      }
      for (int64_t h = 0; h < (kBlock == 1 ? H : 0); ++h) {
        const S* const start = starts + item * stride + HD + h * D;
        const S mass_start = starts[item * stride + 2 * HD + h];
        const S* const power = fading.of(h);
        replay_weighted<T, kWidth, kDecay>(s, w, pi, chunk, h, start, mass_start, power, run, replay, m);
        const S* const later = tails + item * HD + h * D;
        const S mass_later = mass_tails[item * H + h];
        S mass_run = 0;
        double da_total = 0;
        fill_zero(tail, D);
        for (int k = count - 1; k >= 0; --k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S p = pi[n * H + h], mk = m[k], inverse = S(1) / mk, factor = p * mk;
          const int rest = count - 1 - k;
          S dm = 0, dpi = 0;
#pragma omp simd reduction(+ : dm, dpi)
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]), ox = load(o[at + d]);
            const S A = replay[k * D + d], f = S(1) / (mk + A), g = mk * f;
            const S r = factor * f * f * (x * ox);
            tail[d] = faded<kDecay>(tail[d], power, 1) + r;
            dm -= r * A * inverse;
            const S bar = faded<kDecay>(later[d], power, rest) + tail[d];
            dpi += x * (x * bar - ox * g);
            partial[at + d] = p * (S(2) * x * bar - ox * g);
          }
          mass_run = faded<kDecay>(mass_run, power, 1) + dm;
          const S mass_bar = faded<kDecay>(mass_later, power, rest) + mass_run;
          slope[k * H + h] = dpi + mass_bar;
          if constexpr (kDecay) {
            const S* const before = k ? replay + (k - 1) * D : start;
            da_total += mass_bar * (k ? m[k - 1] - S(kMassFloor) : mass_start);
            da_total += bars_times<S>(D, later, power[rest], tail, before);
          }
        }
        if constexpr (kDecay) da_parts[item * H + h] = da_total;
      }
      for_each_masked(chunk.rows, [&](int n) {
        fill_zero(de + (chunk.token + n) * H, H);
        if (dscale) fill_zero(dscale + (chunk.token + n) * H, H);
      });
      for (int k = 0; k < count; ++k) {
        const int64_t n = chunk.row(k);
        softmax_backward(slope + k * H, pi + n * H, H);
        for (int64_t h = 0; h < H; ++h) de[n * H + h] = t[h] * slope[k * H + h];
      }
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + h * D;
        const S* const power = fading.of(h);
        fill_zero(run, D);
        fill_zero(tail, D);
        double dt_total = 0;
        for (int k = 0; k < count; ++k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S kn = energy_scale(s, scale, call.scale_stride, chunk, k, h), dn = kn * de[n * H + h];
          S e = 0;
#pragma omp simd reduction(+ : e)
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]), xx = x * x;
            run[d] = faded<kDecay>(run[d], power, 1) + xx;
            const S c = faded<kDecay>(start[d], power, k + 1) + run[d];
            const S share = xx / (c > S(kPrefixFloor) ? c : S(kPrefixFloor));
            e += share;
            tail[d] -= faded<kDecay>(c > S(kPrefixFloor) ? dn * share / c : S(0), power, k + 1);
          }
          dt_total += slope[k * H + h] * (kn * e + energy_shift(s, bias, call.bias_stride, chunk, k, h));
          if (dscale) dscale[n * H + h] = de[n * H + h] * e;
        }
        widen(tail, D, parts + item * HD + h * D);
        dt_parts[item * H + h] = dt_total;
      }
    }
    carry_over_chunks(layout, fading, parts + 0, H, D, true, static_cast<const S*>(call.dsquares), tails + 0, HD,
                      static_cast<S*>(call.dsquares_in));

#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; ++item) {
      const Chunk chunk(layout, call.mask, item);
      for_each_masked(chunk.rows, [&](int n) { fill_zero(dw + (chunk.token + n) * HD, HD); });
      for (int64_t h = 0; h < H; ++h) {
        const S* const start = starts + item * stride + h * D;
        const S* const power = fading.of(h);
        replay_squares<T, kWidth, kDecay>(s, w, chunk, h, start, power, run, replay);
        const S* const later = tails + item * HD + h * D;
        double da_total = 0;
        fill_zero(tail, D);
        for (int k = chunk.rows.count - 1; k >= 0; --k) {
          const int64_t n = chunk.row(k), at = n * HD + h * D;
          const S dn = energy_scale(s, scale, call.scale_stride, chunk, k, h) * de[n * H + h];
          const int rest = chunk.rows.count - 1 - k;
#pragma omp simd
          for (int64_t d = 0; d < D; ++d) {
            const S x = load(w[at + d]), c = replay[k * D + d];
            const S inverse = S(1) / (c > S(kPrefixFloor) ? c : S(kPrefixFloor));
            const S u = c > S(kPrefixFloor) ? dn * (x * inverse) * (x * inverse) : S(0);
            tail[d] = faded<kDecay>(tail[d], power, 1) - u;
            const S bar = faded<kDecay>(later[d], power, rest) + tail[d];
            dw[at + d] = store<T>(partial[at + d] + S(2) * x * (dn * inverse + bar));
          }
          if constexpr (kDecay)
            da_total += bars_times<S>(D, later, power[rest], tail, k ? replay + (k - 1) * D : start);
        }
        if constexpr (kDecay) da_parts[item * H + h] += da_total;
      }
    }
#pragma omp for schedule(static)
    for (int64_t h = 0; h < H; ++h) {
      double total = 0;
      for (int64_t item = 0; item < items; ++item) total += dt_parts[item * H + h];
      dt[h] = S(total);
      if constexpr (kDecay) {
        double da = 0;
        for (int64_t item = 0; item < items; ++item) da += da_parts[item * H + h];
        static_cast<S*>(call.ddecay)[h] = S(da);
      }
    }
  }
  return tost::kDone;
}

template <class T, int kWidth, int kBlock>
int causal_backward(const tost::CausalBackward& call) {
  return call.decay ? causal_backward_as<T, kWidth, kBlock, true>(call)
                    : causal_backward_as<T, kWidth, kBlock, false>(call);
}

}  // namespace
