// Second moments in blocks of g features: products of features, and equations with m I + W, where W = sum pi w_b w_b^T.
//
// The products w_i w_j of a block are kept once per pair, ordered by the distance j - i, then by i. In the sums that
// Python sees, [H, width] with width = D (g + 1) / 2, those of one distance lie together for all blocks of a head.
//
// A block is far too small to fill a register, so kSide of them, from one head or several, lie side by side in a tile:
// [g][kSide] for features, [pairs][kSide] for products. A block's features are consecutive, so a tile is a piece of a
// token's row, transposed. What belongs to a head (pi, the mass) comes as one number per lane.
#pragma once

#include <limits>

#include "common.h"

// Long enough for a call, and called from many places: one copy of each keeps the library small and quick to compile.
#define TOST_OUTLINE __attribute__((noinline))

namespace {

// As in kernel.cpp: kBlock is 0 for blocks of any size. 1 means no blocks at all: the kernels then compute with squares and
// leave everything here alone.
template <class S, int kBlock>
class Blocks {
 public:
  static constexpr int kSide = 64 / sizeof(S);

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
  int64_t features() const { return size() * kSide; }  // numbers in a tile of features
  int64_t products() const { return pairs * kSide; }   // numbers in a tile of products

  // Where the product of features i <= j stands in a tile of products.
  int64_t at(int64_t i, int64_t j) const {
    const int64_t apart = j - i;
    return (apart * size() - apart * (apart - 1) / 2 + i) * kSide;
  }

  // out[v] = from[head of lane v]; lanes past the last block belong to the last head and hold zeros everywhere else.
  TOST_OUTLINE void spread(int64_t tile, const S* from, S* out) const {
    spread_by(tile, [&](int64_t h) { return from[h]; }, out);
  }
  template <class OfHead>
  void spread_by(int64_t tile, OfHead of_head, S* out) const {
    for (int v = 0; v < kSide; ++v) out[v] = of_head(head(tile * kSide + v));
  }
  // out[head of lane v] += from[v].
  TOST_OUTLINE void collect(int64_t tile, const S* from, S* out) const {
    for (int64_t v = 0; v < count(tile); ++v) out[(tile * kSide + v) / per_head] += from[v];
  }

  // x = the features of a tile in a row [H, D].
  template <class T>
  TOST_OUTLINE void load_features(int64_t tile, const T* row, S* x) const {
    const int64_t g = size();
    row += tile * kSide * g;
    if (count(tile) == kSide) {
      for (int v = 0; v < kSide; ++v)
        for (int64_t i = 0; i < g; ++i) x[i * kSide + v] = load(row[v * g + i]);
    } else {
      fill_zero(x, features());
      for (int64_t v = 0; v < count(tile); ++v)
        for (int64_t i = 0; i < g; ++i) x[i * kSide + v] = load(row[v * g + i]);
    }
  }
  template <class T>
  TOST_OUTLINE void store_features(int64_t tile, const S* x, T* row) const {
    const int64_t g = size();
    row += tile * kSide * g;
    if (count(tile) == kSide) {
      for (int v = 0; v < kSide; ++v)
        for (int64_t i = 0; i < g; ++i) row[v * g + i] = store<T>(x[i * kSide + v]);
    } else {
      for (int64_t v = 0; v < count(tile); ++v)
        for (int64_t i = 0; i < g; ++i) row[v * g + i] = store<T>(x[i * kSide + v]);
    }
  }

  // W = the products of a tile in sums [H, width], and back.
  TOST_OUTLINE void load_products(int64_t tile, const S* sums, S* W) const {
    fill_zero(W, products());
    for_each_product(tile, [&](int64_t from, int64_t to) { W[to] = sums[from]; });
  }
  TOST_OUTLINE void store_products(int64_t tile, const S* W, S* sums) const {
    for_each_product(tile, [&](int64_t to, int64_t from) { sums[to] = W[from]; });
  }

  // W_ij += p x_i x_j.
  TOST_OUTLINE void add_products(const S* p, const S* x, S* W) const {
    for (int64_t i = 0; i < size(); ++i) {
      S px[kSide];
#pragma omp simd
      for (int v = 0; v < kSide; ++v) px[v] = p[v] * x[i * kSide + v];
      for (int64_t j = i; j < size(); ++j) {
        S* const w = W + at(i, j);
#pragma omp simd
        for (int v = 0; v < kSide; ++v) w[v] += px[v] * x[j * kSide + v];
      }
    }
  }

  // W_ij += p (u_i z_j + u_j z_i), once for i = j: a gradient of products.
  TOST_OUTLINE void add_symmetric(const S* p, const S* u, const S* z, S* W) const {
    for (int64_t i = 0; i < size(); ++i) {
      S pu[kSide], pz[kSide];
#pragma omp simd
      for (int v = 0; v < kSide; ++v) {
        pu[v] = p[v] * u[i * kSide + v];
        pz[v] = p[v] * z[i * kSide + v];
      }
      for (int64_t j = i; j < size(); ++j) {
        S* const w = W + at(i, j);
        const S other = i == j ? S(0) : S(1);
#pragma omp simd
        for (int v = 0; v < kSide; ++v) w[v] += pu[v] * z[j * kSide + v] + other * pz[v] * u[j * kSide + v];
      }
    }
  }

  // F = the factors of m I + W = L P L^T: 1 / P on the diagonal, L below it. What elimination leaves of W is positive
  // semi-definite but for rounding errors. Held above those, it leaves solutions bounded for W of any size.
  TOST_OUTLINE void factor(const S* m, const S* W, S* F) const {
    std::memcpy(F, W, sizeof(S) * products());
    const S noise = S(size()) * std::numeric_limits<S>::epsilon();
    for (int64_t j = 0; j < size(); ++j) {
      S* const pivot = F + at(j, j);
      const S* const given = W + at(j, j);
#pragma omp simd
      for (int v = 0; v < kSide; ++v) {
        const S least = noise * given[v];
        pivot[v] = S(1) / (m[v] + (pivot[v] < least ? least : pivot[v]));
      }
      for (int64_t i = j + 1; i < size(); ++i) {
        S l[kSide];
        const S* const column = F + at(j, i);
#pragma omp simd
        for (int v = 0; v < kSide; ++v) l[v] = column[v] * pivot[v];
        for (int64_t r = j + 1; r <= i; ++r) {
          S* const rest = F + at(r, i);
          const S* const other = F + at(j, r);
#pragma omp simd
          for (int v = 0; v < kSide; ++v) rest[v] -= l[v] * other[v];
        }
      }
      for (int64_t i = j + 1; i < size(); ++i) {
        S* const column = F + at(j, i);
#pragma omp simd
        for (int v = 0; v < kSide; ++v) column[v] *= pivot[v];
      }
    }
  }

  // x = (m I + W)^{-1} x, in place; `pitch` numbers lie between the features of x.
  TOST_OUTLINE void solve(const S* F, S* x, int64_t pitch = kSide) const {
    for (int64_t j = 0; j < size(); ++j)
      for (int64_t i = j + 1; i < size(); ++i) subtract(F + at(j, i), x + j * pitch, x + i * pitch);
    for (int64_t j = size() - 1; j >= 0; --j) {
      const S* const pivot = F + at(j, j);
#pragma omp simd
      for (int v = 0; v < kSide; ++v) x[j * pitch + v] *= pivot[v];
      for (int64_t i = j + 1; i < size(); ++i) subtract(F + at(j, i), x + i * pitch, x + j * pitch);
    }
  }

  // C = (m I + W)^{-1} C (m I + W)^{-1} for gradients of products C; square is size() tiles of features of scratch.
  TOST_OUTLINE void solve_both_sides(const S* F, S* C, S* square) const {
    for (int64_t i = 0; i < size(); ++i)
      for (int64_t j = 0; j < size(); ++j) {
        const S* const from = C + (i < j ? at(i, j) : at(j, i));
        for (int v = 0; v < kSide; ++v) square[(i * size() + j) * kSide + v] = (i == j ? S(1) : S(0.5)) * from[v];
      }
    for (int64_t i = 0; i < size(); ++i) solve(F, square + i * features());
    for (int64_t j = 0; j < size(); ++j) solve(F, square + j * kSide, features());
    for (int64_t i = 0; i < size(); ++i)
      for (int64_t j = i; j < size(); ++j) {
        S* const to = C + at(i, j);
        for (int v = 0; v < kSide; ++v) to[v] = (i == j ? S(1) : S(2)) * square[(i * size() + j) * kSide + v];
      }
  }

  // out_i = sum_j G_ij x_j, and twice G_ii x_i: what a gradient G of the products x_i x_j is to x.
  TOST_OUTLINE void through_products(const S* G, const S* x, S* out) const {
    for (int64_t i = 0; i < size(); ++i) {
      S sum[kSide] = {};
      for (int64_t j = 0; j < size(); ++j) {
        const S* const entry = G + (i < j ? at(i, j) : at(j, i));
#pragma omp simd
        for (int v = 0; v < kSide; ++v) sum[v] += (i == j ? S(2) : S(1)) * entry[v] * x[j * kSide + v];
      }
      std::memcpy(out + i * kSide, sum, sizeof sum);
    }
  }

  // out += sum_i x_i y_i in every lane, over all numbers of two tiles of a kind.
  TOST_OUTLINE void add_dot(const S* x, const S* y, int64_t numbers, S* out) const {
    for (int64_t i = 0; i < numbers; i += kSide)
#pragma omp simd
      for (int v = 0; v < kSide; ++v) out[v] += x[i + v] * y[i + v];
  }

  // out += u^T W z in every lane.
  TOST_OUTLINE void add_form(const S* u, const S* W, const S* z, S* out) const {
    for (int64_t i = 0; i < size(); ++i)
      for (int64_t j = 0; j < size(); ++j) {
        const S* const entry = W + (i < j ? at(i, j) : at(j, i));
#pragma omp simd
        for (int v = 0; v < kSide; ++v) out[v] += u[i * kSide + v] * entry[v] * z[j * kSide + v];
      }
  }

  // Blocks of a tile.
  int64_t count(int64_t tile) const { return lanes - tile * kSide < kSide ? lanes - tile * kSide : kSide; }

 private:
  int64_t head(int64_t lane) const { return (lane < lanes ? lane : lanes - 1) / per_head; }

  static void subtract(const S* l, const S* x, S* y) {
#pragma omp simd
    for (int v = 0; v < kSide; ++v) y[v] -= l[v] * x[v];
  }

  // Calls each(place in [H, width], place in the tile).
  template <class Each>
  void for_each_product(int64_t tile, Each each) const {
    const int64_t g = size();
    for (int64_t v = 0; v < count(tile); ++v) {
      const int64_t lane = tile * kSide + v, h = lane / per_head, block = lane % per_head;
      for (int64_t i = 0; i < g; ++i)
        for (int64_t j = i; j < g; ++j) {
          const int64_t apart = j - i, before = apart * g - apart * (apart - 1) / 2;
          each(h * width + per_head * before + block * (g - apart) + i, at(i, j) + v);
        }
    }
  }
};

}  // namespace
