// Tiles for statistics that carry content: about means, or with decays from the data. See block.h.
//
// Such statistics are computed in tiles for blocks of any size, also where a block is a single feature. What fades, and is
// weighed, by itself is a head or a block of it, which is a lane.
#pragma once

#include "block.h"

namespace {

// A number for every lane of a tile, zeros past the last one, and back. Copies of a known size are single instructions.
template <class S, class Tile>
inline Lanes<S> read_lanes(const Tile& tile, const S* row) {
  if (tile.count == Blocks<S, 0>::kSide)
    return *reinterpret_cast<const typename LanesOf<S>::anywhere*>(row + tile.first);
  Lanes<S> x = {};
  for (int64_t v = 0; v < tile.count; ++v) x[v] = row[tile.first + v];
  return x;
}
template <class S, class Tile>
inline void write_lanes(const Tile& tile, const Lanes<S>& x, S* row) {
  if (tile.count == Blocks<S, 0>::kSide) {
    *reinterpret_cast<typename LanesOf<S>::anywhere*>(row + tile.first) = x;
    return;
  }
  for (int64_t v = 0; v < tile.count; ++v) row[tile.first + v] = x[v];
}

// As tile.collect, with a sum that is a tree where all lanes are of one head.
template <class S, class Tile>
inline void collect(const Tile& tile, const Lanes<S>& from, S* out) {
  constexpr int kSide = Blocks<S, 0>::kSide;
  if (tile.count < kSide || tile.head[0] != tile.head[kSide - 1]) return tile.collect(from, out);
  S parts[kSide];
  std::memcpy(parts, &from, sizeof parts);
  S sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int v = 0; v < kSide; ++v) sum += parts[v];
  out[tile.head[0]] += sum;
}

// Blocks of one feature, a lane each. What Blocks does in loops and calls is one instruction here.
template <class S>
class Singles : public Blocks<S, 0> {
 public:
  using V = Lanes<S>;
  using typename Blocks<S, 0>::Tile;
  static constexpr int64_t pairs = 1;

  Singles(int64_t H, int64_t D, int64_t) : Blocks<S, 0>(H, D, 1) {}

  static constexpr int64_t size() { return 1; }
  void load_features(const Tile& tile, const S* row, V* x) const { *x = read_lanes<S>(tile, row); }
  void store_features(const Tile& tile, const V* x, S* row) const { write_lanes<S>(tile, *x, row); }
  void load_products(const Tile& tile, const S* sums, V* W) const { *W = read_lanes<S>(tile, sums); }
  void store_products(const Tile& tile, const V* W, S* sums) const { write_lanes<S>(tile, *W, sums); }
  void add_products(const V& p, const V* x, V* W) const { *W += p * (*x * *x); }
  void add_symmetric(const V& p, const V* u, const V* z, V* W) const { *W += p * (*u * *z); }
  void factor(const V& m, const V* W, const V*, V* F) const { *F = S(1) / (m + *W); }
  void solve(const V* F, V* x) const { *x *= *F; }
  void through_products(const V* G, const V* x, V* out) const { *out = S(2) * *G * *x; }
  V dot(const V* x, const V* y, int64_t) const { return *x * *y; }
  V form(const V* u, const V* W, const V* z) const { return *u * *W * *z; }
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
inline Lanes<S> center(const Singles<S>&, const Lanes<S>& m, const Lanes<S>* mean, const Lanes<S>* W,
                       Lanes<S>* left) {
  const Lanes<S> variance = *W - m * *mean * *mean, zero = {};
  *left = variance < zero ? zero : variance;
  return variance < zero ? zero : zero + S(1);
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
    return apart ? read_lanes<S>(tile, row) : tile.spread(row);
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
    if (!apart) return collect<S>(tile, x, row);
    write_lanes<S>(tile, read_lanes<S>(tile, row) + x, row);
  }
};

}  // namespace
