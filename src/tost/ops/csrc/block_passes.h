// What the kernels do with the tokens of a chunk, and with the tiles of a sequence, where statistics are in blocks.
//
// Tokens come as the first row of a chunk, with what belongs to their heads as [tokens, H], and only real rows are
// looked at. Equations are with m I + W in place of I + S; the factor m is put back where a solution is used.
#pragma once

#include "block.h"

namespace {

// The scratch of one thread: tiles of features x, o, t, of products W, F, C, a square of features, a number per lane.
// `rows` tiles of features u and z, and two numbers per lane, are kept for every token of a causal chunk; `histories` of
// them also have their products.
template <class S, int kBlock>
struct BlockWork {
  S *x, *o, *t, *W, *F, *C, *square, *p, *m, *c, *a, *u, *z, *dot, *dmass, *history;

  BlockWork(const Blocks<S, kBlock>& blocks, S* memory, int64_t rows = 0) {
    const auto take = [&](int64_t count) {
      S* const part = memory;
      memory += count;
      return part;
    };
    constexpr int64_t lane = Blocks<S, kBlock>::kSide;
    x = take(blocks.features()), o = take(blocks.features()), t = take(blocks.features());
    W = take(blocks.products()), F = take(blocks.products()), C = take(blocks.products());
    square = take(blocks.size() * blocks.features());
    p = take(lane), m = take(lane), c = take(lane), a = take(lane);
    u = take(rows * blocks.features()), z = take(rows * blocks.features());
    dot = take(rows * lane), dmass = take(rows * lane);
    history = memory;
  }
  static int64_t numbers(const Blocks<S, kBlock>& blocks, int64_t rows = 0, int64_t histories = 0) {
    constexpr int64_t lane = Blocks<S, kBlock>::kSide;
    return (3 + blocks.size() + 2 * rows) * blocks.features() + (3 + histories) * blocks.products() +
           (4 + 2 * rows) * lane;
  }
};

template <class S>
struct BlockWork<S, 1> {
  BlockWork(const Blocks<S, 1>&, S*, int64_t = 0) {}
  static int64_t numbers(const Blocks<S, 1>&, int64_t = 0, int64_t = 0) { return 0; }
};

// m = mass + floor of every lane of a tile.
template <class S, int kBlock>
inline void spread_mass(const Blocks<S, kBlock>& blocks, int64_t tile, const S* mass, S* m) {
  blocks.spread(tile, mass, m);
  for (int v = 0; v < blocks.kSide; ++v) m[v] += S(kMassFloor);
}

// W = a W, with a number per lane.
template <class S, int kBlock>
inline void fade(const Blocks<S, kBlock>& blocks, const S* a, S* W) {
  for (int64_t i = 0; i < blocks.products(); i += blocks.kSide)
#pragma omp simd
    for (int v = 0; v < blocks.kSide; ++v) W[i + v] *= a[v];
}

// sums [H, width] = sum over the real rows of pi w_b w_b^T, after those before have faded by decay [H], or null.
template <class T, class S, int kBlock>
TOST_OUTLINE void sum_products(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const T* w,
                         const Rows& rows, const S* weight, const S* decay, S* sums) {
  for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
    fill_zero(work.W, blocks.products());
    if (decay) blocks.spread(tile, decay, work.a);
    for (int k = 0; k < rows.count; ++k) {
      blocks.load_features(tile, w + rows.index[k] * blocks.H * blocks.D, work.x);
      blocks.spread(tile, weight + k * blocks.H, work.p);
      if (decay) fade(blocks, work.a, work.W);
      blocks.add_products(work.p, work.x, work.W);
    }
    blocks.store_products(tile, work.W, sums);
  }
}

// --- Non-causal: one set of statistics per sequence

// factors [B, tiles, pairs, lanes] of all sequences, in a parallel region.
template <class S, int kBlock>
TOST_OUTLINE void factor_tiles(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, int64_t B, const S* mass,
                         const S* weighted, S* factors) {
#pragma omp for schedule(static)
  for (int64_t item = 0; item < B * blocks.tiles; ++item) {
    const int64_t b = item / blocks.tiles, tile = item % blocks.tiles;
    spread_mass(blocks, tile, mass + b * blocks.H, work.m);
    blocks.load_products(tile, weighted + b * blocks.H * blocks.width, work.W);
    blocks.factor(work.m, work.W, factors + item * blocks.products());
  }
}

// y = -pi m (m I + W)^{-1} w.
template <class T, class S, int kBlock>
TOST_OUTLINE void shrink_tokens(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const T* w,
                          const Rows& rows, const S* pi, const S* mass, const S* factors, T* y) {
  const int64_t HD = blocks.H * blocks.D;
  for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
    const S* const F = factors + tile * blocks.products();
    spread_mass(blocks, tile, mass, work.m);
    for (int k = 0; k < rows.count; ++k) {
      blocks.load_features(tile, w + rows.index[k] * HD, work.x);
      blocks.spread(tile, pi + rows.index[k] * blocks.H, work.p);
      blocks.solve(F, work.x);
      for (int64_t i = 0; i < blocks.features(); i += blocks.kSide)
#pragma omp simd
        for (int v = 0; v < blocks.kSide; ++v) work.x[i + v] *= -work.p[v] * work.m[v];
      blocks.store_features(tile, work.x, y + rows.index[k] * HD);
    }
  }
}

// sums [H, width] = sum over the real rows of pi (o_i w_j + o_j w_i).
template <class T, class S, int kBlock>
TOST_OUTLINE void sum_symmetric(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const T* w, const T* o,
                          const Rows& rows, const S* pi, S* sums) {
  const int64_t HD = blocks.H * blocks.D;
  for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
    fill_zero(work.W, blocks.products());
    for (int k = 0; k < rows.count; ++k) {
      blocks.load_features(tile, w + rows.index[k] * HD, work.x);
      blocks.load_features(tile, o + rows.index[k] * HD, work.o);
      blocks.spread(tile, pi + rows.index[k] * blocks.H, work.p);
      blocks.add_symmetric(work.p, work.x, work.o, work.W);
    }
    blocks.store_products(tile, work.W, sums);
  }
}

// reaches = dW [B, tiles, pairs, lanes] from those sums of all sequences, and dM [B, H], in a parallel region.
template <class S, int kBlock>
TOST_OUTLINE void reach_tiles(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, int64_t B, const S* mass,
                        const S* weighted, const S* factors, const S* sums, S* reaches, S* dM) {
#pragma omp for schedule(static)
  for (int64_t b = 0; b < B; ++b) {
    fill_zero(dM + b * blocks.H, blocks.H);
    for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
      const int64_t at = (b * blocks.tiles + tile) * blocks.products();
      S* const dW = reaches + at;
      spread_mass(blocks, tile, mass + b * blocks.H, work.m);
      blocks.load_products(tile, weighted + b * blocks.H * blocks.width, work.W);
      blocks.load_products(tile, sums + b * blocks.H * blocks.width, dW);
      blocks.solve_both_sides(factors + at, dW, work.square);
      fade(blocks, work.m, dW);
      fill_zero(work.c, blocks.kSide);
      blocks.add_dot(dW, work.W, blocks.products(), work.c);
      for (int v = 0; v < blocks.kSide; ++v) work.c[v] /= -work.m[v];
      blocks.collect(tile, work.c, dM + b * blocks.H);
    }
  }
}

// slopes [rows, H] = w^T dW w - m o^T (m I + W)^{-1} w.
template <class T, class S, int kBlock>
TOST_OUTLINE void slopes_of_tokens(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const T* w, const T* o,
                             const Rows& rows, const S* mass, const S* factors, const S* reaches, S* slopes) {
  const int64_t HD = blocks.H * blocks.D;
  fill_zero(slopes, rows.count * blocks.H);
  for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
    const S *const F = factors + tile * blocks.products(), *const dW = reaches + tile * blocks.products();
    spread_mass(blocks, tile, mass, work.m);
    for (int k = 0; k < rows.count; ++k) {
      blocks.load_features(tile, w + rows.index[k] * HD, work.x);
      blocks.load_features(tile, o + rows.index[k] * HD, work.o);
      blocks.through_products(dW, work.x, work.t);
      fill_zero(work.c, blocks.kSide);
      fill_zero(work.p, blocks.kSide);
      blocks.add_dot(work.x, work.t, blocks.features(), work.c);
      blocks.solve(F, work.x);
      blocks.add_dot(work.x, work.o, blocks.features(), work.p);
      for (int v = 0; v < blocks.kSide; ++v) work.c[v] = S(0.5) * work.c[v] - work.m[v] * work.p[v];
      blocks.collect(tile, work.c, slopes + k * blocks.H);
    }
  }
}

// dw = pi (2 dW w - m (m I + W)^{-1} o) + 2 w (q de + ds).
template <class T, class S, int kBlock>
TOST_OUTLINE void gradients_of_tokens(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const T* w,
                                const T* o, const Rows& rows, const S* pi, const S* de, const S* mass, const S* q,
                                const S* ds, const S* factors, const S* reaches, T* dw) {
  const int64_t HD = blocks.H * blocks.D;
  S *const q_tile = work.W, *const ds_tile = work.C;  // no smaller than features
  for (int64_t tile = 0; tile < blocks.tiles; ++tile) {
    const S *const F = factors + tile * blocks.products(), *const dW = reaches + tile * blocks.products();
    spread_mass(blocks, tile, mass, work.m);
    blocks.load_features(tile, q, q_tile);
    blocks.load_features(tile, ds, ds_tile);
    for (int k = 0; k < rows.count; ++k) {
      blocks.load_features(tile, w + rows.index[k] * HD, work.x);
      blocks.load_features(tile, o + rows.index[k] * HD, work.o);
      blocks.spread(tile, pi + rows.index[k] * blocks.H, work.p);
      blocks.spread(tile, de + rows.index[k] * blocks.H, work.c);
      blocks.through_products(dW, work.x, work.t);
      blocks.solve(F, work.o);
      for (int64_t i = 0; i < blocks.features(); i += blocks.kSide)
#pragma omp simd
        for (int v = 0; v < blocks.kSide; ++v)
          work.t[i + v] = work.p[v] * (work.t[i + v] - work.m[v] * work.o[i + v]) +
                          S(2) * work.x[i + v] * (q_tile[i + v] * work.c[v] + ds_tile[i + v]);
      blocks.store_features(tile, work.t, dw + rows.index[k] * HD);
    }
  }
}

}  // namespace
