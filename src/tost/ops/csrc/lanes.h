// Tiles for statistics that carry content: about means, or with decays from the data. See block.h.
//
// Such statistics are computed in tiles for blocks of any size, also where a block is a single feature. What fades, and is
// weighed, by itself is a head or a block of it, which is a lane.
#pragma once

#include "block.h"

namespace {

// Blocks of one feature, a lane each. What Blocks does in loops and calls is one instruction here.
template <class S>
class Singles : public Blocks<S, 0> {
 public:
  using V = Lanes<S>;
  using typename Blocks<S, 0>::Tile;
  using Blocks<S, 0>::kSide;

  Singles(int64_t H, int64_t D, int64_t) : Blocks<S, 0>(H, D, 1) {}

  static constexpr int64_t size() { return 1; }
  void load_features(const Tile& tile, const S* row, V* x) const { *x = read(tile, row); }
  void store_features(const Tile& tile, const V* x, S* row) const {
    std::memcpy(row + tile.first, x, sizeof(S) * tile.count);
  }
  void load_products(const Tile& tile, const S* sums, V* W) const { *W = read(tile, sums); }
  void store_products(const Tile& tile, const V* W, S* sums) const { store_features(tile, W, sums); }
  void add_products(const V& p, const V* x, V* W) const { *W += p * (*x * *x); }
  void add_symmetric(const V& p, const V* u, const V* z, V* W) const { *W += p * (*u * *z); }
  void factor(const V& m, const V* W, const V*, V* F) const { *F = S(1) / (m + *W); }
  void solve(const V* F, V* x) const { *x *= *F; }
  void through_products(const V* G, const V* x, V* out) const { *out = S(2) * *G * *x; }
  V dot(const V* x, const V* y, int64_t) const { return *x * *y; }
  V form(const V* u, const V* W, const V* z) const { return *u * *W * *z; }
  void solve_both_sides(const V* F, V* C, V*) const { *C *= *F * *F; }
  V center(const V& m, const V* mean, const V* W, V* left) const {
    const V variance = *W - m * *mean * *mean;
    *left = variance < 0 ? V{} : variance;
    return variance < 0 ? V{} : V{} + S(1);
  }

 private:
  V read(const Tile& tile, const S* row) const {
    V x = {};
    std::memcpy(&x, row + tile.first, sizeof(S) * (tile.count == kSide ? kSide : tile.count));
    return x;
  }
};

// left = W - m mean mean^T, the products about the mean. Returns 1 where gradients reach them, and 0 for a variance that
// rounding made negative and that is held at 0. In blocks `factor` holds what elimination leaves of them instead.
template <class S, int kBlock>
inline Lanes<S> center(const Blocks<S, kBlock>& blocks, const Lanes<S>& m, const Lanes<S>* mean, const Lanes<S>* W,
                       Lanes<S>* left) {
  std::memcpy(static_cast<void*>(left), W, sizeof *W * blocks.pairs);
  blocks.add_products(-m, mean, left);
  return Lanes<S>{} + S(1);
}
template <class S>
inline Lanes<S> center(const Singles<S>& blocks, const Lanes<S>& m, const Lanes<S>* mean, const Lanes<S>* W,
                       Lanes<S>* left) {
  return blocks.center(m, mean, W, left);
}

// x = a x for `count` registers.
template <class V>
inline void scale_by(const V& a, V* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= a;
}

// Numbers that a head has once, or if `apart` for each of its blocks: decays, masses, counts. A row of them is [H, each].
template <class B>
struct Own {
  using S = typename B::Scalar;
  using V = Lanes<S>;
  using Tile = typename B::Tile;

  const B& blocks;
  const bool apart;
  const int64_t each, count;

  Own(const B& blocks, bool apart)
      : blocks(blocks), apart(apart), each(apart ? blocks.per_head : 1), count(blocks.H * each) {}

  V load(const Tile& tile, const S* row) const {
    if (!apart) return tile.spread(row);
    V x = {};
    std::memcpy(&x, row + tile.first, sizeof(S) * (tile.count == B::kSide ? B::kSide : tile.count));
    return x;
  }
  // As load, but a number that a head has once is in the lane of its first block only: it counts once.
  V load_once(const Tile& tile, const S* row) const {
    if (apart) return load(tile, row);
    V x = {};
    for (int64_t v = 0; v < tile.count; ++v)
      if (tile.first + v == tile.head[v] * blocks.per_head) x[v] = row[tile.head[v]];
    return x;
  }
  // The lanes of a head hold the same number if it has only one.
  void store(const Tile& tile, const V& x, S* row) const {
    for (int64_t v = 0; v < tile.count; ++v) row[apart ? tile.first + v : tile.head[v]] = x[v];
  }
  void add(const Tile& tile, const V& x, S* row) const {
    if (!apart) return tile.collect(x, row);
    for (int64_t v = 0; v < tile.count; ++v) row[tile.first + v] += x[v];
  }
};

}  // namespace
