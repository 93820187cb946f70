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

// Adds a token to the sums W of a tile, after they have faded by a, or null, and finds their factors F; x is the token's.
template <class S, int kBlock>
TOST_OUTLINE void advance(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work,
                          const typename Blocks<S, kBlock>::Tile& tile, const S* w, const Lanes<S>& p,
                          const Lanes<S>& m, const Lanes<S>* a) {
  blocks.load_features(tile, w, work.x);
  if (a) fade(blocks, *a, work.W);
  blocks.add_products(p, work.x, work.W);
  blocks.factor(m, work.W, work.F);
}

// y = -pi m (m I + W)^{-1} w, with the sums W up to each token, after those at the start.
template <class S, int kBlock>
TOST_OUTLINE void shrink_causally(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const S* w,
                                  const Rows& rows, const S* pi, const S* masses, const S* start, const S* decay,
                                  S* y) {
  const int64_t H = blocks.H, HD = H * blocks.D;
  for (int64_t index = 0; index < blocks.tiles; ++index) {
    const typename Blocks<S, kBlock>::Tile tile(blocks, index);
    const Lanes<S> a = decay ? tile.spread(decay) : Lanes<S>{};
    blocks.load_products(tile, start, work.W);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      const Lanes<S> p = tile.spread(pi + n * H), m = tile.spread(masses + k * H), share = -p * m;
      advance(blocks, work, tile, w + n * HD, p, m, decay ? &a : nullptr);
      blocks.solve(work.F, work.x);
      for (int64_t i = 0; i < blocks.size(); ++i) work.x[i] *= share;
      blocks.store_features(tile, work.x, y + n * HD);
    }
  }
}

// What the outputs of a chunk add to the gradients of the sums at its start: dW [H, width] and dM [H].
template <class S, int kBlock, bool kDecay>
TOST_OUTLINE void reach_of_chunk(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const S* w,
                                 const S* o, const Rows& rows, const S* pi, const S* masses, const S* start,
                                 const S* decay, const Fading<S, kDecay>& fading, S* dW, S* dM) {
  const int64_t H = blocks.H, HD = H * blocks.D;
  fill_zero(dM, H);
  for (int64_t index = 0; index < blocks.tiles; ++index) {
    const typename Blocks<S, kBlock>::Tile tile(blocks, index);
    const Lanes<S> a = decay ? tile.spread(decay) : Lanes<S>{};
    Lanes<S> total = {};
    blocks.load_products(tile, start, work.W);
    fill_zero(work.C, blocks.pairs);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      const Lanes<S> m = tile.spread(masses + k * H);
      Lanes<S> p = tile.spread(pi + n * H);
      advance(blocks, work, tile, w + n * HD, p, m, decay ? &a : nullptr);
      blocks.load_features(tile, o + n * HD, work.o);
      blocks.solve(work.F, work.x);
      blocks.solve(work.F, work.o);
      if constexpr (kDecay) p *= tile.spread_by([&](int64_t h) { return fading.of(h)[k + 1]; });
      total -= p * blocks.form(work.x, work.W, work.o);
      blocks.add_symmetric(p * m, work.x, work.o, work.C);
    }
    blocks.store_products(tile, work.C, dW);
    tile.collect(total, dM);
  }
}

// With the gradient `later` [H, width] of the sums after the chunk: the slopes of the memberships and what each token
// adds to the gradient of the mass, both [rows, H], the first part of dw in the places of w (see `descend`), and in da
// [H] the gradient of the decay, which is null where there is none.
template <class S, int kBlock>
TOST_OUTLINE void descend_chunk(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const S* w,
                                const S* o, const Rows& rows, const S* pi, const S* masses, const S* start,
                                const S* decay, const S* later, S* slopes, S* dmass, S* dw, S* da) {
  const int64_t H = blocks.H, HD = H * blocks.D, g = blocks.size(), pairs = blocks.pairs;
  fill_zero(slopes, rows.count * H);
  fill_zero(dmass, rows.count * H);
  if (da) fill_zero(da, H);
  for (int64_t index = 0; index < blocks.tiles; ++index) {
    const typename Blocks<S, kBlock>::Tile tile(blocks, index);
    const Lanes<S> a = decay ? tile.spread(decay) : Lanes<S>{};
    blocks.load_products(tile, start, work.W);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      const Lanes<S> p = tile.spread(pi + n * H), m = tile.spread(masses + k * H);
      Lanes<S> *const u = work.u + k * g, *const z = work.z + k * g;
      if (da) std::copy(work.W, work.W + pairs, work.history + k * pairs);
      advance(blocks, work, tile, w + n * HD, p, m, decay ? &a : nullptr);
      std::copy(work.x, work.x + g, u);
      blocks.load_features(tile, o + n * HD, z);
      blocks.solve(work.F, u);
      blocks.solve(work.F, z);
      tile.collect(-p * blocks.form(u, work.W, z), dmass + k * H);
    }
    blocks.load_products(tile, later, work.C);
    Lanes<S> through_decay = {};
    for (int k = rows.count - 1; k >= 0; --k) {
      const int n = rows.index[k];
      const Lanes<S> p = tile.spread(pi + n * H), m = tile.spread(masses + k * H);
      const Lanes<S> *const u = work.u + k * g, *const z = work.z + k * g;
      if (decay && k < rows.count - 1) fade(blocks, a, work.C);
      blocks.add_symmetric(p * m, u, z, work.C);
      blocks.load_features(tile, w + n * HD, work.x);
      blocks.through_products(work.C, work.x, work.t);
      tile.collect(descend(blocks, p, m, work.x, z, work.t), slopes + k * H);
      blocks.store_features(tile, work.t, dw + n * HD);
      if (da) through_decay += blocks.dot(work.C, work.history + k * pairs, pairs);
    }
    if (da) tile.collect(through_decay, da);
  }
}

}  // namespace
