// Gated statistics are computed in tiles for blocks of any size, also of a single feature. See block.h.
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

// x = a x for `count` registers.
template <class V>
inline void scale_by(const V& a, V* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= a;
}

}  // namespace
