// What the kernels do with the tokens of a chunk, and with the tiles of a sequence, where statistics are in blocks.
//
// Tokens come as the first row of a chunk, with what belongs to their heads as [tokens, H], and only real rows are
// looked at. Equations are with m I + W in place of I + S; the factor m is put back where a solution is used.
#pragma once

#include "block.h"
#include "block_rows.h"

namespace {

// The scratch of one thread: tiles of features x, o, t, of products W, F, C, and a square of features.
// Blocks of a known size have outer [lanes, g, g].
template <class S, int kBlock>
struct BlockWork {
  using V = Lanes<S>;
  V *x, *o, *t, *W, *F, *C, *square;
  S* outer;

  BlockWork(const Blocks<S, kBlock>& blocks, V* memory) {
    const auto take = [&](int64_t count) {
      V* const part = memory;
      memory += count;
      return part;
    };
    const int64_t g = blocks.size();
    x = take(g), o = take(g), t = take(g);
    W = take(blocks.pairs), F = take(blocks.pairs), C = take(blocks.pairs);
    square = take(g * g);
    outer = reinterpret_cast<S*>(take(outer_count(blocks)));
  }
  // Registers that it takes.
  static int64_t count(const Blocks<S, kBlock>& blocks) {
    const int64_t g = blocks.size();
    return (3 + g) * g + 3 * blocks.pairs + outer_count(blocks);
  }

 private:
  static int64_t outer_count(const Blocks<S, kBlock>& blocks) {
    return kBlock > 0 ? blocks.lanes * kBlock * kBlock / blocks.kSide : 0;
  }
};

template <class S>
struct BlockWork<S, 1> {
  BlockWork(const Blocks<S, 1>&, Lanes<S>*) {}
  static int64_t count(const Blocks<S, 1>&) { return 0; }
};

// W = a W.
template <class S, int kBlock>
inline void fade(const Blocks<S, kBlock>& blocks, const Lanes<S>& a, Lanes<S>* W) {
  for (int64_t i = 0; i < blocks.pairs; ++i) W[i] *= a;
}

// Given x = w, z = (m I + W)^{-1} o and t = 2 dW w, returns the slope of the membership p, w^T (dW w - m z), and turns t
// into the part of dw that does not come from memberships, p (2 dW w - m z).
template <class S, int kBlock>
inline Lanes<S> descend(const Blocks<S, kBlock>& blocks, const Lanes<S>& p, const Lanes<S>& m,
                        const Lanes<S>* __restrict x, const Lanes<S>* __restrict z, Lanes<S>* __restrict t) {
  Lanes<S> slope = {};
  for (int64_t i = 0; i < blocks.size(); ++i) {
    const Lanes<S> mz = m * z[i];
    slope += x[i] * (S(0.5) * t[i] - mz);
    t[i] = p * (t[i] - mz);
  }
  return slope;
}

// sums [H, width] = sum over the real rows of pi w_b w_b^T.
template <class S, int kBlock>
TOST_OUTLINE void sum_products(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const S* w,
                               const Rows& rows, const S* weight, S* sums) {
  if constexpr (kBlock > 0) return sum_products_by_row(blocks, w, rows, weight, work.outer, sums);
  for (int64_t index = 0; index < blocks.tiles; ++index) {
    const typename Blocks<S, kBlock>::Tile tile(blocks, index);
    fill_zero(work.W, blocks.pairs);
    for (int k = 0; k < rows.count; ++k) {
      blocks.load_features(tile, w + rows.index[k] * blocks.H * blocks.D, work.x);
      blocks.add_products(tile.spread(weight + k * blocks.H), work.x, work.W);
    }
    blocks.store_products(tile, work.W, sums);
  }
}

// factors [B, tiles, pairs] of all sequences, in a parallel region.
template <class S, int kBlock>
TOST_OUTLINE void factor_tiles(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, int64_t B,
                               const S* mass, const S* weighted, Lanes<S>* factors) {
#pragma omp for schedule(static)
  for (int64_t item = 0; item < B * blocks.tiles; ++item) {
    const int64_t b = item / blocks.tiles;
    const typename Blocks<S, kBlock>::Tile tile(blocks, item % blocks.tiles);
    blocks.load_products(tile, weighted + b * blocks.H * blocks.width, work.W);
    const Lanes<S> m = tile.spread(mass + b * blocks.H) + S(kMassFloor);
    blocks.factor(m, work.W, factors + item * blocks.pairs);
  }
}

// What the tokens of a sequence are multiplied by, as tiles: its factors and, in the backward pass, its dW. Blocks of a known
// size have both as matrices [lanes, g, g]; see block_rows.h.
template <class S>
struct Multipliers {
  const Lanes<S>*factors, *reaches;
  const S *inverses, *through;
};

// y = -pi m (m I + W)^{-1} w.
template <class S, int kBlock>
TOST_OUTLINE void shrink_tokens(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const S* w,
                                const Rows& rows, const S* pi, const S* mass, const Multipliers<S>& by, S* y) {
  if constexpr (kBlock > 0) return shrink_by_row(blocks, w, rows, pi, by.inverses, y);
  const int64_t HD = blocks.H * blocks.D;
  for (int64_t index = 0; index < blocks.tiles; ++index) {
    const typename Blocks<S, kBlock>::Tile tile(blocks, index);
    const Lanes<S> m = tile.spread(mass) + S(kMassFloor);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      blocks.load_features(tile, w + n * HD, work.x);
      blocks.solve(by.factors + index * blocks.pairs, work.x);
      const Lanes<S> share = -m * tile.spread(pi + n * blocks.H);
      for (int64_t i = 0; i < blocks.size(); ++i) work.x[i] *= share;
      blocks.store_features(tile, work.x, y + n * HD);
    }
  }
}

// sums [H, width] = sum over the real rows of pi (o_i w_j + o_j w_i).
template <class S, int kBlock>
TOST_OUTLINE void sum_symmetric(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const S* w,
                                const S* o, const Rows& rows, const S* pi, S* sums) {
  if constexpr (kBlock > 0) return sum_symmetric_by_row(blocks, w, o, rows, pi, work.outer, sums);
  const int64_t HD = blocks.H * blocks.D;
  for (int64_t index = 0; index < blocks.tiles; ++index) {
    const typename Blocks<S, kBlock>::Tile tile(blocks, index);
    fill_zero(work.W, blocks.pairs);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      blocks.load_features(tile, w + n * HD, work.x);
      blocks.load_features(tile, o + n * HD, work.o);
      blocks.add_symmetric(tile.spread(pi + n * blocks.H), work.x, work.o, work.W);
    }
    blocks.store_products(tile, work.W, sums);
  }
}

// reaches = dW [B, tiles, pairs] from those sums of all sequences, and dM [B, H], in a parallel region.
template <class S, int kBlock>
TOST_OUTLINE void reach_tiles(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, int64_t B,
                              const S* mass, const S* weighted, const Lanes<S>* factors, const S* sums,
                              Lanes<S>* reaches, S* dM) {
#pragma omp for schedule(static)
  for (int64_t b = 0; b < B; ++b) {
    fill_zero(dM + b * blocks.H, blocks.H);
    for (int64_t index = 0; index < blocks.tiles; ++index) {
      const typename Blocks<S, kBlock>::Tile tile(blocks, index);
      const int64_t at = (b * blocks.tiles + index) * blocks.pairs;
      const Lanes<S> m = tile.spread(mass + b * blocks.H) + S(kMassFloor);
      blocks.load_products(tile, weighted + b * blocks.H * blocks.width, work.W);
      blocks.load_products(tile, sums + b * blocks.H * blocks.width, reaches + at);
      blocks.solve_both_sides(factors + at, reaches + at, work.square);
      fade(blocks, m, reaches + at);
      tile.collect(-blocks.dot(reaches + at, work.W, blocks.pairs) / m, dM + b * blocks.H);
    }
  }
}

// slopes [rows, H] and the first part of dw, in the places of w: see `descend`.
template <class S, int kBlock>
TOST_OUTLINE void descend_tokens(const Blocks<S, kBlock>& blocks, const BlockWork<S, kBlock>& work, const S* w,
                                 const S* o, const Rows& rows, const S* pi, const S* mass, const Multipliers<S>& by,
                                 S* slopes, S* dw) {
  if constexpr (kBlock > 0) return descend_by_row(blocks, w, o, rows, pi, by.inverses, by.through, slopes, dw);
  const int64_t HD = blocks.H * blocks.D;
  fill_zero(slopes, rows.count * blocks.H);
  for (int64_t index = 0; index < blocks.tiles; ++index) {
    const typename Blocks<S, kBlock>::Tile tile(blocks, index);
    const Lanes<S> m = tile.spread(mass) + S(kMassFloor);
    for (int k = 0; k < rows.count; ++k) {
      const int n = rows.index[k];
      blocks.load_features(tile, w + n * HD, work.x);
      blocks.load_features(tile, o + n * HD, work.o);
      blocks.through_products(by.reaches + index * blocks.pairs, work.x, work.t);
      blocks.solve(by.factors + index * blocks.pairs, work.o);
      const Lanes<S> slope = descend(blocks, tile.spread(pi + n * blocks.H), m, work.x, work.o, work.t);
      tile.collect(slope, slopes + k * blocks.H);
      blocks.store_features(tile, work.t, dw + n * HD);
    }
  }
}

}  // namespace
