// As block_passes.h, for blocks of a known size: the features of such a block in a row fill a register, or two.
//
// As long as its matrix is that of many tokens, a block is taken alone, and nothing is transposed. A few tokens are taken at
// once, so that rows are read in their order and the sums or matrices of all blocks, [lanes, g, g], stay in the first cache.
#pragma once

#include "block.h"

namespace {

// Features of a block that are in one register.
#ifdef __AVX512F__
constexpr int kRowBytes = 64;
#else
constexpr int kRowBytes = 32;
#endif
template <class S, int kBlock>
constexpr int kRow = kBlock * sizeof(S) <= kRowBytes ? kBlock : kRowBytes / sizeof(S);

template <class S, int kBlock>
struct RowOf {
  static constexpr int kBytes = kRow<S, kBlock> * sizeof(S);
  typedef S type __attribute__((vector_size(kBytes)));
  typedef S anywhere __attribute__((vector_size(kBytes), aligned(sizeof(S)), may_alias));
};
template <class S, int kBlock>
using Row = typename RowOf<S, kBlock>::type;
template <class S, int kBlock>
using RowAnywhere = typename RowOf<S, kBlock>::anywhere;

template <class S, int kBlock>
inline Row<S, kBlock> row_at(const S* place) {
  return *reinterpret_cast<const RowAnywhere<S, kBlock>*>(place);
}
template <class S, int kBlock>
inline void put_row(const Row<S, kBlock>& row, S* place) {
  *reinterpret_cast<RowAnywhere<S, kBlock>*>(place) = row;
}
template <class S, int kBlock>
inline S sum_of(const Row<S, kBlock>& row) {
  S sum = 0;
  TOST_UNROLL
  for (int i = 0; i < kRow<S, kBlock>; ++i) sum += row[i];
  return sum;
}

// A few of the real tokens of a chunk: numbers k .. k + count - 1, at the rows n. Past the last one it is repeated.
struct Few {
  static constexpr int kMost = 8;
  int k, count;
  int64_t n[kMost];

  Few(const Rows& rows, int k) : k(k), count(rows.count - k < kMost ? rows.count - k : kMost) {
    for (int v = 0; v < kMost; ++v) n[v] = rows.index[k + (v < count ? v : count - 1)];
  }
  // Asks for the rows of the next few tokens: a block is a jump away from that of the next token, which processors do not
  // foresee.
  template <class S>
  void prefetch_next(const Rows& rows, const S* x, int64_t HD) const {
    for (int next = k + count; next < rows.count && next < k + 2 * kMost; ++next)
      for (int64_t j = 0; j < HD; j += 64 / int64_t(sizeof(S))) __builtin_prefetch(x + rows.index[next] * HD + j);
  }
};

#if defined(__AVX2__) && __has_builtin(__builtin_shufflevector)
#define TOST_TURNS 1
#else
#define TOST_TURNS 0
#endif

// Sums of x z^T over tokens, for all blocks, where z = weight [tokens, H] times their rows of `from`. kTwins says that x is
// `from`, so that the sums are symmetric.
template <class S, int kBlock, bool kTwins>
class Outer {
 public:
  // At least `lanes * g * g` numbers.
  Outer(const Blocks<S, kBlock>& blocks, S* sums) : blocks_(blocks), sums_(sums) {
    fill_zero(sums, blocks.lanes * kBlock * kBlock);
  }

  // Adds the few tokens.
  void add(const Few& few, const S* x, const S* from, const S* weight, const int64_t* weight_row) const {
    for (int64_t h = 0, block = 0; h < blocks_.H; ++h) {
      S share[Few::kMost];
      for (int v = 0; v < few.count; ++v) share[v] = weight[weight_row[v] * blocks_.H + h];
      for (int64_t end = block + blocks_.per_head; block < end; ++block)
        add_block(few, x + block * kBlock, from + block * kBlock, share, sums_ + block * kBlock * kBlock);
    }
  }

  // The sum of x_i z_j in a block, and of z_i x_j if they are twins.
  S at(int64_t block, int64_t i, int64_t j) const { return sums_[(block * kBlock + i) * kBlock + j]; }

 private:
  static constexpr int kHeld = 8;  // rows of a block's matrix that are summed at once, in registers

  void add_block(const Few& few, const S* x, const S* from, const S* share, S* sums) const {
    const int64_t HD = blocks_.H * blocks_.D;
    for (int first = 0; first < kBlock; first += kHeld) {
      for (int column = 0; column < kBlock; column += kRow<S, kBlock>) {
        S* const place = sums + first * kBlock + column;
        Row<S, kBlock> sum[kHeld];
        TOST_UNROLL
        for (int i = 0; i < kHeld; ++i) sum[i] = row_at<S, kBlock>(place + i * kBlock);
        for (int v = 0; v < few.count; ++v) {
          const Row<S, kBlock> z = share[v] * row_at<S, kBlock>(from + few.n[v] * HD + column);
          TOST_UNROLL
          for (int i = 0; i < kHeld; ++i) sum[i] += x[few.n[v] * HD + first + i] * z;
        }
        TOST_UNROLL
        for (int i = 0; i < kHeld; ++i) put_row<S, kBlock>(sum[i], place + i * kBlock);
      }
    }
  }

  const Blocks<S, kBlock>& blocks_;
  S* const sums_;
};

#if TOST_TURNS
// As above for blocks of 8 floats, which are turned in their register: z times x turned by r has the entries z_i x_{i+r}, where
// indices go around. Twins need the turns 0 .. 4 only, as those of r and 8 - r are the same. Registers of 16 floats take two
// neighbouring blocks of a head at once. Sums lie in the order of the blocks, [turns, 8], or [turns, 16] for two.
template <bool kTwins>
class Outer<float, 8, kTwins> {
 public:
  Outer(const Blocks<float, 8>& blocks, float* sums) : blocks_(blocks), sums_(sums) {
    fill_zero(sums, blocks.lanes * kSquare);
  }

  void add(const Few& few, const float* x, const float* from, const float* weight, const int64_t* weight_row) const {
    for (int64_t h = 0, block = 0; h < blocks_.H; ++h) {
      float share[Few::kMost];
      for (int v = 0; v < few.count; ++v) share[v] = weight[weight_row[v] * blocks_.H + h];
      const int64_t end = block + blocks_.per_head;
      for (; block + kMost <= end; block += kMost)
        add_turns<8 * kMost>(few, x + block * 8, from + block * 8, share, sums_ + block * kSquare, Turns());
      for (; block < end; ++block)
        add_turns<8>(few, x + block * 8, from + block * 8, share, sums_ + block * kSquare, Turns());
    }
  }

  float at(int64_t block, int64_t i, int64_t j) const {
    if (kTwins && (i + 8 - j) % 8 > 4) std::swap(i, j);
    const int64_t before = block % blocks_.per_head, side = before % kMost;
    const bool together = before - side + kMost <= blocks_.per_head;
    const int64_t first = together ? block - side : block, wide = together ? 8 * kMost : 8;
    return sums_[first * kSquare + (i + 8 - j) % 8 * wide + (block - first) * 8 + j];
  }

 private:
  static constexpr int64_t kSquare = 64, kMost = kRowBytes / 32;  // blocks in a register
  using Turns = std::make_integer_sequence<int, kTwins ? 5 : 8>;

  template <int kBy, class V, int... e>
  static V turned(const V& x, std::integer_sequence<int, e...>) {
    return __builtin_shufflevector(x, x, ((e & ~7) | ((e + kBy) & 7))...);
  }

  template <int kWide, int... r>
  void add_turns(const Few& few, const float* x, const float* from, const float* share, float* sums,
                 std::integer_sequence<int, r...>) const {
    using Entries = std::make_integer_sequence<int, kWide>;
    const int64_t HD = blocks_.H * blocks_.D;
    Row<float, kWide> sum[] = {row_at<float, kWide>(sums + r * kWide)...};
    for (int v = 0; v < few.count; ++v) {
      const Row<float, kWide> row = row_at<float, kWide>(x + few.n[v] * HD);
      const Row<float, kWide> z = share[v] * row_at<float, kWide>(from + few.n[v] * HD);
      ((sum[r] += z * turned<r>(row, Entries())), ...);
    }
    (put_row<float, kWide>(sum[r], sums + r * kWide), ...);
  }

  const Blocks<float, 8>& blocks_;
  float* const sums_;
};
#endif

// sums [H, width] = sum over the real rows of pi w_b w_b^T; the weight [rows, H] is pi.
template <class S, int kBlock>
TOST_OUTLINE void sum_products_by_row(const Blocks<S, kBlock>& blocks, const S* w, const Rows& rows, const S* weight,
                                      S* scratch, S* sums) {
  const Outer<S, kBlock, true> outer(blocks, scratch);
  for (int k = 0; k < rows.count; k += Few::kMost) {
    const Few few(rows, k);
    int64_t number[Few::kMost];
    for (int v = 0; v < Few::kMost; ++v) number[v] = k + v;
    few.prefetch_next(rows, w, blocks.H * blocks.D);
    outer.add(few, w, w, weight, number);
  }
  for (int64_t block = 0; block < blocks.lanes; ++block)
    blocks.for_each_product_of(block, [&](int64_t to, int64_t i, int64_t j) { sums[to] = outer.at(block, i, j); });
}

// sums [H, width] = sum over the real rows of pi (o_i w_j + o_j w_i), once for i = j.
template <class S, int kBlock>
TOST_OUTLINE void sum_symmetric_by_row(const Blocks<S, kBlock>& blocks, const S* w, const S* o, const Rows& rows,
                                       const S* pi, S* scratch, S* sums) {
  const Outer<S, kBlock, false> outer(blocks, scratch);
  for (int k = 0; k < rows.count; k += Few::kMost) {
    const Few few(rows, k);
    few.prefetch_next(rows, w, blocks.H * blocks.D);
    few.prefetch_next(rows, o, blocks.H * blocks.D);
    outer.add(few, w, o, pi, few.n);
  }
  for (int64_t block = 0; block < blocks.lanes; ++block)
    blocks.for_each_product_of(block, [&](int64_t to, int64_t i, int64_t j) {
      sums[to] = i == j ? outer.at(block, i, i) : outer.at(block, i, j) + outer.at(block, j, i);
    });
}

// matrices [B, lanes, g, g] of all sequences, whose columns `column(item, tile, j, x)` gives for a tile, in a parallel region.
template <class S, int kBlock, class Column>
inline void spread_tiles(const Blocks<S, kBlock>& blocks, int64_t B, Column column, S* matrices) {
#pragma omp for schedule(static)
  for (int64_t item = 0; item < B * blocks.tiles; ++item) {
    const typename Blocks<S, kBlock>::Tile tile(blocks, item % blocks.tiles);
    S* const first = matrices + (item / blocks.tiles * blocks.lanes + tile.first) * kBlock * kBlock;
    for (int j = 0; j < kBlock; ++j) {
      Lanes<S> x[kBlock] = {};
      column(item, tile, j, x);
      for (int64_t v = 0; v < tile.count; ++v)
        for (int i = 0; i < kBlock; ++i) first[(v * kBlock + j) * kBlock + i] = x[i][v];
    }
  }
}

// matrices = m (m I + W)^{-1}, by the factors of `factor_tiles`.
template <class S, int kBlock>
TOST_OUTLINE void invert_tiles(const Blocks<S, kBlock>& blocks, int64_t B, const S* mass, const Lanes<S>* factors,
                               S* matrices) {
  const auto column = [&](int64_t item, const typename Blocks<S, kBlock>::Tile& tile, int j, Lanes<S>* x) {
    x[j] = tile.spread(mass + item / blocks.tiles * blocks.H) + S(kMassFloor);
    blocks.solve(factors + item * blocks.pairs, x);
  };
  spread_tiles(blocks, B, column, matrices);
}

// matrices = what the gradients dW of `reach_tiles` are to w; see `through_products`.
template <class S, int kBlock>
TOST_OUTLINE void spread_reaches(const Blocks<S, kBlock>& blocks, int64_t B, const Lanes<S>* reaches, S* matrices) {
  const auto column = [&](int64_t item, const typename Blocks<S, kBlock>::Tile&, int j, Lanes<S>* x) {
    for (int i = 0; i < kBlock; ++i) x[i] = (i == j ? S(2) : S(1)) * reaches[item * blocks.pairs + blocks.at(i, j)];
  };
  spread_tiles(blocks, B, column, matrices);
}

// out = sum_j x_j column_j for the features from `first` on of a block of the few tokens.
template <class S, int kBlock>
inline void multiply(const Few& few, int64_t HD, int64_t block, int first, const S* matrices, const S* x,
                     Row<S, kBlock>* out) {
  const S* const columns = matrices + block * kBlock * kBlock + first;
  TOST_UNROLL
  for (int v = 0; v < Few::kMost; ++v) out[v] = Row<S, kBlock>{};
  // Unrolled, the sums would be made trees, with additions beside the products.
  _Pragma("GCC unroll 1")
  for (int j = 0; j < kBlock; ++j) {
    const Row<S, kBlock> column = row_at<S, kBlock>(columns + j * kBlock);
    TOST_UNROLL
    for (int v = 0; v < Few::kMost; ++v) out[v] += x[few.n[v] * HD + block * kBlock + j] * column;
  }
}

// y = -pi m (m I + W)^{-1} w, with the inverses of the sequence; y may be w.
template <class S, int kBlock>
TOST_OUTLINE void shrink_by_row(const Blocks<S, kBlock>& blocks, const S* w, const Rows& rows, const S* pi,
                                const S* inverses, S* y) {
  const int64_t H = blocks.H, HD = H * blocks.D;
  for (int k = 0; k < rows.count; k += Few::kMost) {
    const Few few(rows, k);
    few.prefetch_next(rows, w, HD);
    for (int64_t h = 0, block = 0; h < H; ++h) {
      S share[Few::kMost];
      for (int v = 0; v < Few::kMost; ++v) share[v] = -pi[few.n[v] * H + h];
      for (int64_t end = block + blocks.per_head; block < end; ++block) {
        constexpr int kSize = kRow<S, kBlock>, kParts = kBlock / kSize;
        Row<S, kBlock> out[kParts][Few::kMost];  // all of it before any of w may be overwritten
        for (int part = 0; part < kParts; ++part)
          multiply<S, kBlock>(few, HD, block, part * kSize, inverses, w, out[part]);
        for (int part = 0; part < kParts; ++part) {
          S* const place = y + block * kBlock + part * kSize;
          TOST_UNROLL
          for (int v = 0; v < Few::kMost; ++v) put_row<S, kBlock>(share[v] * out[part][v], place + few.n[v] * HD);
        }
      }
    }
  }
}

// As `descend_tokens`, with the matrices of the sequence: the inverses, and those of its dW.
template <class S, int kBlock>
TOST_OUTLINE void descend_by_row(const Blocks<S, kBlock>& blocks, const S* w, const S* o, const Rows& rows, const S* pi,
                                 const S* inverses, const S* reaches, S* slopes, S* dw) {
  const int64_t H = blocks.H, HD = H * blocks.D;
  for (int k = 0; k < rows.count; k += Few::kMost) {
    const Few few(rows, k);
    few.prefetch_next(rows, w, HD);
    few.prefetch_next(rows, o, HD);
    for (int64_t h = 0, block = 0; h < H; ++h) {
      Row<S, kBlock> parts[Few::kMost] = {};
      for (int64_t end = block + blocks.per_head; block < end; ++block) {
        for (int first = 0; first < kBlock; first += kRow<S, kBlock>) {
          Row<S, kBlock> t[Few::kMost], mz[Few::kMost];
          multiply<S, kBlock>(few, HD, block, first, reaches, w, t);
          multiply<S, kBlock>(few, HD, block, first, inverses, o, mz);
          TOST_UNROLL
          for (int v = 0; v < Few::kMost; ++v) {
            const int64_t at = few.n[v] * HD + block * kBlock + first;
            parts[v] += row_at<S, kBlock>(w + at) * (S(0.5) * t[v] - mz[v]);
            put_row<S, kBlock>(pi[few.n[v] * H + h] * (t[v] - mz[v]), dw + at);
          }
        }
      }
      for (int v = 0; v < few.count; ++v) slopes[(k + v) * H + h] = sum_of<S, kBlock>(parts[v]);
    }
  }
}

}  // namespace
