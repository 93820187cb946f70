// As block_passes.h, for the causal form: the statistics of every token of a chunk, replayed from the sums at its start.
//
// masses [rows, H] are those up to every real token, with the floor added. decay [H] is null where nothing is forgotten;
// sums fade by it before a token is added, and gradients of sums on their way back.
#pragma once

#include "block_passes.h"
#include "fading.h"

namespace {

template <bool kDecay, class S>
inline void replay_masses(int64_t H, const Rows& rows, const S* pi, const S* start, const Fading<S, kDecay>& fading,
                          S* masses) {
  for (int64_t h = 0; h < H; ++h) {
    const S* const power = fading.of(h);
    S run = 0;
    for (int k = 0; k < rows.count; ++k) {
      run = faded<kDecay>(run, power, 1) + pi[rows.index[k] * H + h];
      masses[k * H + h] = faded<kDecay>(start[h], power, k + 1) + run + S(kMassFloor);
    }
  }
}

// Adds the k-th real token to the sums W of a tile, and finds their factors F; x, p and m are that token's.
template <class T, class S, int kBlock>
TOST_OUTLINE void advance(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, int64_t tile, const T* w,
                    const S* pi, const S* masses, const S* decay) {
  blocks.load_features(tile, w, work.x);
  blocks.spread(tile, pi, work.p);
  blocks.spread(tile, masses, work.m);
  if (decay) fade(blocks, work.a, work.W);
  blocks.add_products(work.p, work.x, work.W);
  blocks.factor(work.m, work.W, work.F);
}

// y = -pi m (m I + W)^{-1} w, with the sums W up to each token, after those at the start.
template <class T, class S, int kBlock>
TOST_OUTLINE void shrink_causally(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const T* w,
                            const Rows& rows, const S* pi, const S* masses, const S* start, const S* decay, T* y) {
  const int64_t H = blocks.H, HD = H * blocks.D;
  for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
    blocks.load_products(tile, start, work.W);
    if (decay) blocks.spread(tile, decay, work.a);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      advance(blocks, work, tile, w + n * HD, pi + n * H, masses + k * H, decay);
      blocks.solve(work.F, work.x);
      for (int64_t i = 0; i < blocks.features(); i += blocks.kSide)
#pragma omp simd
        for (int v = 0; v < blocks.kSide; ++v) work.x[i + v] *= -work.p[v] * work.m[v];
      blocks.store_features(tile, work.x, y + n * HD);
    }
  }
}

// What the outputs of a chunk add to the gradients of the sums at its start: dW [H, width] and dM [H].
template <class T, class S, int kBlock, bool kDecay>
TOST_OUTLINE void reach_of_chunk(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const T* w, const T* o,
                           const Rows& rows, const S* pi, const S* masses, const S* start, const S* decay,
                           const Fading<S, kDecay>& fading, S* dW, S* dM) {
  const int64_t H = blocks.H, HD = H * blocks.D;
  S* const total = work.dot;
  fill_zero(dM, H);
  for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
    blocks.load_products(tile, start, work.W);
    if (decay) blocks.spread(tile, decay, work.a);
    fill_zero(work.C, blocks.products());
    fill_zero(total, blocks.kSide);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      advance(blocks, work, tile, w + n * HD, pi + n * H, masses + k * H, decay);
      blocks.load_features(tile, o + n * HD, work.o);
      blocks.solve(work.F, work.x);
      blocks.solve(work.F, work.o);
      if constexpr (kDecay) {
        blocks.spread_by(tile, [&](int64_t h) { return fading.of(h)[k + 1]; }, work.c);
        for (int v = 0; v < blocks.kSide; ++v) work.p[v] *= work.c[v];
      }
      fill_zero(work.c, blocks.kSide);
      blocks.add_form(work.x, work.W, work.o, work.c);
      for (int v = 0; v < blocks.kSide; ++v) {
        total[v] -= work.p[v] * work.c[v];
        work.c[v] = work.p[v] * work.m[v];
      }
      blocks.add_symmetric(work.c, work.x, work.o, work.C);
    }
    blocks.store_products(tile, work.C, dW);
    blocks.collect(tile, total, dM);
  }
}

// With the gradient `later` [H, width] of the sums after the chunk: the slopes of the memberships and what each token
// adds to the gradient of the mass, both [rows, H], the part of dw that does not come from memberships, [rows, H, D] in
// the places of w, and in da [H] the gradient of the decay, which is null where there is none.
template <class T, class S, int kBlock>
TOST_OUTLINE void descend_chunk(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const T* w, const T* o,
                          const Rows& rows, const S* pi, const S* masses, const S* start, const S* decay,
                          const S* later, S* slopes, S* dmass, S* partial, S* da) {
  const int64_t H = blocks.H, HD = H * blocks.D, kSide = blocks.kSide;
  fill_zero(slopes, rows.count * H);
  fill_zero(dmass, rows.count * H);
  if (da) fill_zero(da, H);
  for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
    blocks.load_products(tile, start, work.W);
    if (decay) blocks.spread(tile, decay, work.a);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      S *const u = work.u + k * blocks.features(), *const z = work.z + k * blocks.features();
      S *const dot = work.dot + k * kSide, *const dm = work.dmass + k * kSide;
      if (da) std::memcpy(work.history + k * blocks.products(), work.W, sizeof(S) * blocks.products());
      advance(blocks, work, tile, w + n * HD, pi + n * H, masses + k * H, decay);
      blocks.load_features(tile, o + n * HD, work.o);
      std::memcpy(u, work.x, sizeof(S) * blocks.features());
      std::memcpy(z, work.o, sizeof(S) * blocks.features());
      blocks.solve(work.F, u);
      blocks.solve(work.F, z);
      fill_zero(dot, kSide);
      fill_zero(dm, kSide);
      blocks.add_dot(work.o, u, blocks.features(), dot);
      blocks.add_form(u, work.W, z, dm);
      for (int v = 0; v < kSide; ++v) dm[v] *= -work.p[v];
      blocks.collect(tile, dm, dmass + k * H);
    }
    blocks.load_products(tile, later, work.C);
    fill_zero(work.dmass, kSide);
    for (int k = rows.count - 1; k >= 0; --k) {
      const int n = rows.index[k];
      const S *const u = work.u + k * blocks.features(), *const z = work.z + k * blocks.features();
      S* const dot = work.dot + k * kSide;
      blocks.load_features(tile, w + n * HD, work.x);
      blocks.spread(tile, pi + n * H, work.p);
      blocks.spread(tile, masses + k * H, work.m);
      for (int v = 0; v < kSide; ++v) work.c[v] = work.p[v] * work.m[v];
      if (decay && k < rows.count - 1) fade(blocks, work.a, work.C);
      blocks.add_symmetric(work.c, u, z, work.C);
      blocks.through_products(work.C, work.x, work.t);
      for (int v = 0; v < kSide; ++v) dot[v] *= -work.m[v];
      for (int64_t i = 0; i < blocks.features(); i += kSide) {
#pragma omp simd
        for (int v = 0; v < kSide; ++v) {
          dot[v] += S(0.5) * work.x[i + v] * work.t[i + v];
          work.t[i + v] = work.p[v] * (work.t[i + v] - work.m[v] * z[i + v]);
        }
      }
      blocks.collect(tile, dot, slopes + k * H);
      blocks.store_features(tile, work.t, partial + n * HD);
      if (da) blocks.add_dot(work.C, work.history + k * blocks.products(), blocks.products(), work.dmass);
    }
    if (da) blocks.collect(tile, work.dmass, da);
  }
}

}  // namespace
