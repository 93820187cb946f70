// Second moments in blocks of g features: products of features, and equations with m I + W, where W = sum pi w_b w_b^T.
//
// The products w_i w_j of a block are kept once per pair, ordered by the distance j - i, then by i. In the sums that
// Python sees, [H, width] with width = D (g + 1) / 2, those of one distance lie together for all blocks of a head.
//
// What is done with one block is done with kSide of them at once, from one head or several: a tile. Its features are g
// registers and its products one register per pair, with a lane for every block. A block's features are consecutive, so
// a tile is a piece of a token's row, transposed. What belongs to a head (pi, the mass) is spread over its lanes.
#pragma once

#include <limits>
#include <utility>

#include "common.h"

// Long enough for a call, and called from many places: one copy of each keeps the library small and quick to compile.
#define TOST_OUTLINE __attribute__((noinline))
// Before a loop over the features of a block: with a size that is known they become registers.
#define TOST_UNROLL _Pragma("GCC unroll 8")

namespace {

// The sizes of blocks that are compiled as a constant, in float; the larger one without order only.
constexpr int kFastBlock = 8, kWideBlock = 16;

// A register of numbers. None is wider than kFastBlock floats, so that tiles of such blocks are transposed as squares.
#ifdef __AVX__
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
template <class S>
struct LanesOf {
  typedef S type __attribute__((vector_size(kRegisterBytes)));
  typedef S anywhere __attribute__((vector_size(kRegisterBytes), aligned(sizeof(S)), may_alias));
};
template <class S>
using Lanes = typename LanesOf<S>::type;

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
#if __has_builtin(__builtin_shufflevector)
// Swaps the entries of a whose index has the bit with those of b whose index has not.
template <size_t kBit, class V, size_t... e>
inline void swap_entries(V& a, V& b, std::index_sequence<e...>) {
  constexpr size_t n = sizeof...(e);
  const V upper = a, lower = b;
  a = __builtin_shufflevector(upper, lower, (e & kBit ? n + (e ^ kBit) : e)...);
  b = __builtin_shufflevector(upper, lower, (e & kBit ? n + e : e ^ kBit)...);
}

// Transposes n registers of n numbers: entry c of row r goes to entry r of row c, one bit of r and c after the other.
template <size_t n, size_t kBit = n / 2, class V>
inline void transpose(V* rows) {
  if constexpr (kBit > 0) {
    TOST_UNROLL
    for (size_t r = 0; r < n; ++r)
      if (!(r & kBit)) swap_entries<kBit>(rows[r], rows[r | kBit], std::make_index_sequence<n>());
    transpose<n, kBit / 2>(rows);
  }
}
#else
template <size_t n, class V>
inline void transpose(V* rows) {
  for (size_t r = 0; r < n; ++r)
    for (size_t c = 0; c < r; ++c) {
      const auto entry = rows[r][c];
      rows[r][c] = rows[c][r];
      rows[c][r] = entry;
    }
}
#endif

// As in kernel.cpp: kBlock is 0 for blocks of any size. 1 means no blocks at all: the kernels then compute with squares and
// leave everything here alone.
template <class S, int kBlock>
class Blocks {
 public:
  using Scalar = S;
  using V = Lanes<S>;
  static constexpr int kSize = kBlock;
  static constexpr int kSide = sizeof(V) / sizeof(S);

  Blocks(int64_t H, int64_t D, int64_t size)
      : H(H),
        D(D),
        size_(size),
        per_head(D / size),
        lanes(H * per_head),
        tiles((lanes + kSide - 1) / kSide),
        pairs(size * (size + 1) / 2),
        width(D * (size + 1) / 2) {}

  const int64_t H, D;

 private:
  const int64_t size_;

 public:
  const int64_t per_head, lanes, tiles, pairs, width;

  int64_t size() const { return kBlock ? kBlock : size_; }

  // Which blocks stand in a tile, and the heads that they are of. Lanes past the last block are of the last head and
  // hold zeros everywhere else.
  struct Tile {
    int64_t first, count;
    int64_t head[kSide];

    Tile(const Blocks& blocks, int64_t index)
        : first(index * kSide), count(blocks.lanes - first < kSide ? blocks.lanes - first : kSide) {
      int64_t h = first / blocks.per_head, next = (h + 1) * blocks.per_head - first;
      for (int64_t v = 0; v < kSide; ++v) {
        if (v == next && v < count) ++h, next += blocks.per_head;
        head[v] = h;
      }
    }
    // A number of every head [H] in the lanes of its blocks.
    V spread(const S* from) const {
      return spread_by([&](int64_t h) { return from[h]; });
    }
    template <class OfHead>
    V spread_by(OfHead of_head) const {
      if (head[0] == head[kSide - 1]) return V{} + of_head(head[0]);
      V out;
      for (int v = 0; v < kSide; ++v) out[v] = of_head(head[v]);
      return out;
    }
    // out[head of lane v] += from[v].
    void collect(const V& from, S* out) const {
      for (int64_t v = 0; v < count;) {
        const int64_t h = head[v];
        S sum = out[h];
        do sum += from[v++];
        while (v < count && head[v] == h);
        out[h] = sum;
      }
    }
  };

  // Where the product of features i and j stands in a tile.
  int64_t at(int64_t i, int64_t j) const {
    const int64_t apart = i < j ? j - i : i - j;
    return apart * size() - apart * (apart - 1) / 2 + (i < j ? i : j);
  }

  // Calls each(place in [H, width], i, j) for the products i <= j of a block.
  template <class Each>
  void for_each_product_of(int64_t block, Each each) const {
    const int64_t g = size(), h = block / per_head;
    for (int64_t apart = 0, before = 0; apart < g; before += g - apart, ++apart)
      for (int64_t i = 0; i < g - apart; ++i)
        each(h * width + per_head * before + (block - h * per_head) * (g - apart) + i, i, i + apart);
  }

  // x = the features of a tile in a row [H, D], and back.
  TOST_OUTLINE void load_features(const Tile& tile, const S* row, V* __restrict x) const {
    row += tile.first * size();
    prefetch(row + kAhead * H * D);
    if (kFast && tile.count == kSide) {
      for (int64_t first = 0; first < size(); first += kSide) {
        V rows[kSide];
        TOST_UNROLL
        for (int v = 0; v < kSide; ++v) rows[v] = *reinterpret_cast<const Anywhere*>(row + v * size() + first);
        transpose<kSide>(rows);
        TOST_UNROLL
        for (int v = 0; v < kSide; ++v) x[first + v] = rows[v];
      }
      return;
    }
    for (int64_t i = 0; i < size(); ++i) x[i] = V{};
    for (int64_t v = 0; v < tile.count; ++v)
      for (int64_t i = 0; i < size(); ++i) x[i][v] = row[v * size() + i];
  }
  TOST_OUTLINE void store_features(const Tile& tile, const V* __restrict x, S* row) const {
    row += tile.first * size();
    if (kFast && tile.count == kSide) {
      for (int64_t first = 0; first < size(); first += kSide) {
        V rows[kSide];
        TOST_UNROLL
        for (int v = 0; v < kSide; ++v) rows[v] = x[first + v];
        transpose<kSide>(rows);
        TOST_UNROLL
        for (int v = 0; v < kSide; ++v) *reinterpret_cast<Anywhere*>(row + v * size() + first) = rows[v];
      }
      return;
    }
    for (int64_t v = 0; v < tile.count; ++v)
      for (int64_t i = 0; i < size(); ++i) row[v * size() + i] = x[i][v];
  }

  // W = the products of a tile in sums [H, width], and back.
  TOST_OUTLINE void load_products(const Tile& tile, const S* sums, V* W) const {
    fill_zero(W, pairs);
    for_each_product(tile, [&](int64_t from, int64_t to, int64_t v) { W[to][v] = sums[from]; });
  }
  TOST_OUTLINE void store_products(const Tile& tile, const V* W, S* sums) const {
    for_each_product(tile, [&](int64_t to, int64_t from, int64_t v) { sums[to] = W[from][v]; });
  }

  // W_ij += p x_i x_j.
  TOST_OUTLINE void add_products(const V& p, const V* __restrict x, V* __restrict W) const {
    const int64_t g = size();
    TOST_UNROLL
    for (int64_t i = 0; i < g; ++i) {
      const V px = p * x[i];
      TOST_UNROLL
      for (int64_t j = i; j < g; ++j) W[at(i, j)] += px * x[j];
    }
  }

  // W_ij += p (u_i z_j + u_j z_i), once for i = j: a gradient of products.
  TOST_OUTLINE void add_symmetric(const V& p, const V* __restrict u, const V* __restrict z, V* __restrict W) const {
    const int64_t g = size();
    TOST_UNROLL
    for (int64_t i = 0; i < g; ++i) {
      const V pu = p * u[i], pz = p * z[i];
      W[at(i, i)] += pu * z[i];
      TOST_UNROLL
      for (int64_t j = i + 1; j < g; ++j) W[at(i, j)] += pu * z[j] + pz * u[j];
    }
  }

  // F = the factors of m I + W = L P L^T, row after row: L below the diagonal, 1 / P on it. What elimination leaves of W is
  // positive semi-definite but for rounding errors. Held above those, it leaves solutions bounded for W of any size. They
  // are those of `from`, the products that W was made of, or W itself.
  void factor(const V& m, const V* W, V* F) const { factor(m, W, W, F); }
  TOST_OUTLINE void factor(const V& m, const V* W, const V* from, V* __restrict F) const {
    const int64_t g = size();
    const S noise = S(g) * std::numeric_limits<S>::epsilon();
    TOST_UNROLL
    for (int64_t i = 0; i < g; ++i) {
      V* const row = F + in_row(i, 0);  // its entries are those of L P until the row is done
      int64_t j = 0;
      TOST_UNROLL
      for (; j + kAtOnce <= i; j += kAtOnce) eliminate<kAtOnce>(W, F, i, j, row);
      TOST_UNROLL
      for (; j < i; ++j) eliminate<1>(W, F, i, j, row);
      V left = W[at(i, i)];
      TOST_UNROLL
      for (j = 0; j < i; ++j) {
        const V entry = row[j], l = entry * F[in_row(j, j)];
        left -= entry * l;
        row[j] = l;
      }
      const V least = noise * from[at(i, i)];
      row[i] = S(1) / (m + (left < least ? least : left));
    }
  }

  // x = (m I + W)^{-1} x, in place.
  TOST_OUTLINE void solve(const V* __restrict F, V* __restrict x) const {
    const int64_t g = size();
    TOST_UNROLL
    for (int64_t j = 0; j < g; ++j) {
      TOST_UNROLL
      for (int64_t i = j + 1; i < g; ++i) x[i] -= F[in_row(i, j)] * x[j];
    }
    TOST_UNROLL
    for (int64_t j = 0; j < g; ++j) x[j] *= F[in_row(j, j)];
    TOST_UNROLL
    for (int64_t i = g - 1; i > 0; --i) {
      TOST_UNROLL
      for (int64_t j = 0; j < i; ++j) x[j] -= F[in_row(i, j)] * x[i];
    }
  }

  // C = (m I + W)^{-1} C (m I + W)^{-1} for gradients of products C; square is size() tiles of features of scratch.
  TOST_OUTLINE void solve_both_sides(const V* F, V* C, V* square) const {
    const int64_t g = size();
    for (int64_t i = 0; i < g; ++i)
      for (int64_t j = 0; j < g; ++j) square[i * g + j] = (i == j ? S(1) : S(0.5)) * C[at(i, j)];
    for (int side = 0; side < 2; ++side) {
      for (int64_t i = 0; i < g; ++i) solve(F, square + i * g);
      for (int64_t i = 0; i < g; ++i)
        for (int64_t j = 0; j < i; ++j) std::swap(square[i * g + j], square[j * g + i]);
    }
    for (int64_t i = 0; i < g; ++i)
      for (int64_t j = i; j < g; ++j) C[at(i, j)] = (i == j ? S(1) : S(2)) * square[i * g + j];
  }

  // out_i = sum_j G_ij x_j, and twice G_ii x_i: what a gradient G of the products x_i x_j is to x.
  TOST_OUTLINE void through_products(const V* __restrict G, const V* __restrict x, V* __restrict out) const {
    const int64_t g = size();
    TOST_UNROLL
    for (int64_t i = 0; i < g; ++i) {
      V sum = S(2) * G[at(i, i)] * x[i];
      TOST_UNROLL
      for (int64_t j = 0; j < g; ++j)
        if (j != i) sum += G[at(i, j)] * x[j];
      out[i] = sum;
    }
  }

  // sum_i x_i y_i over `count` registers of two tiles of a kind.
  TOST_OUTLINE V dot(const V* x, const V* y, int64_t count) const {
    V sum = {};
    for (int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
    return sum;
  }

  // u^T W z.
  TOST_OUTLINE V form(const V* __restrict u, const V* __restrict W, const V* __restrict z) const {
    const int64_t g = size();
    V sum = {};
    TOST_UNROLL
    for (int64_t i = 0; i < g; ++i) {
      V row = W[at(i, i)] * z[i];
      TOST_UNROLL
      for (int64_t j = 0; j < g; ++j)
        if (j != i) row += W[at(i, j)] * z[j];
      sum += u[i] * row;
    }
    return sum;
  }

 private:
  using Anywhere = typename LanesOf<S>::anywhere;  // in memory that is not aligned
  static constexpr bool kFast = kBlock > 0 && kBlock % kSide == 0;

  // Where entry j <= i of a row of the factors stands in a tile.
  static constexpr int64_t in_row(int64_t i, int64_t j) { return i * (i + 1) / 2 + j; }

  // Entries j .. j + n - 1 of row i of the factors, before they are divided by P. One after the other they would wait for
  // their own sums.
  static constexpr int kAtOnce = 4;
  template <int n>
  void eliminate(const V* W, const V* F, int64_t i, int64_t j, V* row) const {
    V entry[n];
    TOST_UNROLL
    for (int c = 0; c < n; ++c) entry[c] = W[at(j + c, i)];
    for (int64_t r = 0; r < j; ++r) {
      TOST_UNROLL
      for (int c = 0; c < n; ++c) entry[c] -= row[r] * F[in_row(j + c, r)];
    }
    TOST_UNROLL
    for (int c = 0; c < n; ++c) {
      TOST_UNROLL
      for (int r = 0; r < c; ++r) entry[c] -= entry[r] * F[in_row(j + c, j + r)];
      row[j + c] = entry[c];
    }
  }

  // Tokens are visited one after the other for the same tile, which is a jump over the rest of a row that processors do
  // not foresee: this asks for a tile of a later row.
  static constexpr int64_t kAhead = 4;
  void prefetch(const S* row) const {
    for (int64_t i = 0; i < size() * kSide; i += 64 / int64_t(sizeof(S))) __builtin_prefetch(row + i);
  }

  // Calls each(place in [H, width], place in the tile, lane).
  template <class Each>
  void for_each_product(const Tile& tile, Each each) const {
    for (int64_t v = 0; v < tile.count; ++v)
      for_each_product_of(tile.first + v, [&](int64_t place, int64_t i, int64_t j) { each(place, at(i, j), v); });
  }
};

}  // namespace
