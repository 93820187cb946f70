// A matrix times a few vectors, in the time it takes to read the matrix once.
//
// Weights are read row by row from front to back, which is what memory is fastest at; a row meets all vectors while it
// is in the registers. A weight may be float, bfloat16, or a byte with one scale per row; products and sums are float.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common.h"

namespace {

// Floats in a register.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Numbers __attribute__((vector_size(4 * kLanes)));

inline float load(int8_t x) { return float(x); }

inline Floats load_vector(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Conversions are spelled out where compilers take vectors of short numbers apart.
#if defined(__AVX512F__)
inline Floats load_vector(const bfloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Floats)((Words)_mm512_cvtepu16_epi32(bits) << 16);
}
inline Floats load_vector(const int8_t* from) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#elif defined(__AVX2__)
inline Floats load_vector(const bfloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Floats)((Words)_mm256_cvtepu16_epi32(bits) << 16);
}
inline Floats load_vector(const int8_t* from) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
#else
inline Floats load_vector(const bfloat16* from) {
  Words v;
  for (int i = 0; i < kLanes; ++i) v[i] = uint32_t(from[i].bits) << 16;
  return (Floats)v;
}
inline Floats load_vector(const int8_t* from) {
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(from[i]);
  return v;
}
#endif

inline float sum_of(Floats v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// out[r, b] = sum_c rows[r, c] x[b, c] for kRows rows, `columns` apart, and kBatch vectors, `columns` apart too. kParts
// running sums for each hide the latency of an addition. Not inlined: it is called from many places, and compiled once.
template <class W, int kRows, int kBatch, int kParts>
__attribute__((noinline)) void products(const W* rows, const float* x, int64_t columns, float* out) {
  Floats sums[kRows][kBatch][kParts];
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kBatch * kParts; ++i)
    sums[i / (kBatch * kParts)][i / kParts % kBatch][i % kParts] = Floats{};
  int64_t c = 0;
  for (; c + kLanes * kParts <= columns; c += kLanes * kParts)
    for (int p = 0; p < kParts; ++p) {
      const int64_t at = c + kLanes * p;
      Floats weights[kRows];
      for (int r = 0; r < kRows; ++r) {
        weights[r] = load_vector(rows + r * columns + at);
        // The processor foresees one row that is read to its end, but not that four more follow four.
        if (kRows > 1) __builtin_prefetch(rows + (r + kRows) * columns + at);
      }
      for (int b = 0; b < kBatch; ++b) {
        const Floats values = load_vector(x + b * columns + at);
        for (int r = 0; r < kRows; ++r) sums[r][b][p] += weights[r] * values;
      }
    }
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kBatch; ++i) {
    Floats total = sums[i / kBatch][i % kBatch][0];
    for (int p = 1; p < kParts; ++p) total += sums[i / kBatch][i % kBatch][p];
    out[i] = sum_of(total);
  }
  for (; c < columns; ++c)
    for (int i = 0; i < kRows * kBatch; ++i)
      out[i] += load(rows[i / kBatch * columns + c]) * x[i % kBatch * columns + c];
}

// Calls take(b, row, value) with every entry of x W^T + bias whose row is in [first, last), kRows rows at a time.
template <class W, int kRows, class Take>
inline void rows_times(const tost::Matrix& m, const float* x, int64_t B, int64_t first, int64_t last, Take take) {
  const auto weight = static_cast<const W*>(m.weight);
  float out[kRows * 4];
  for (int64_t row = first; row + kRows <= last; row += kRows) {
    const W* const rows = weight + row * m.columns;
    const auto finish = [&](int64_t b0, int count) {
      for (int r = 0; r < kRows; ++r)
        for (int b = 0; b < count; ++b) {
          const float scaled = m.scale ? out[r * count + b] * m.scale[row + r] : out[r * count + b];
          take(b0 + b, row + r, m.bias ? scaled + m.bias[row + r] : scaled);
        }
    };
    constexpr int kParts = kRows == 1 ? 4 : 1, kHalf = kRows == 1 ? 2 : 1;
    int64_t b = 0;
    for (; b + 4 <= B; b += 4) products<W, kRows, 4, 1>(rows, x + b * m.columns, m.columns, out), finish(b, 4);
    for (; b + 2 <= B; b += 2) products<W, kRows, 2, kHalf>(rows, x + b * m.columns, m.columns, out), finish(b, 2);
    for (; b < B; ++b) products<W, kRows, 1, kParts>(rows, x + b * m.columns, m.columns, out), finish(b, 1);
  }
}

// Where the vectors do not stay in the first cache beside a row, four rows go together: then a vector is read once for
// all four. Otherwise that would only disturb the reading of the matrix, which takes all the time.
inline int64_t rows_together(int64_t columns, int64_t B) { return B * columns > 4096 ? 4 : 1; }

// Where the share of thread `index` of `threads` begins: each gets a run of rows and reads memory from front to back.
// Shares consist of whole blocks. Which numbers meet in a register, and how they are rounded, is then the same for any
// number of threads.
inline int64_t first_row(int64_t rows, int index, int threads) {
  constexpr int64_t kBlock = 16;
  return index == threads ? rows : rows / kBlock * index / threads * kBlock;
}

template <class W, class Take>
inline void multiply(const tost::Matrix& m, const float* x, int64_t B, int index, int threads, Take take) {
  const int64_t first = first_row(m.rows, index, threads), last = first_row(m.rows, index + 1, threads);
  const int64_t even = rows_together(m.columns, B) == 1 ? first : first + (last - first) / 4 * 4;
  rows_times<W, 4>(m, x, B, first, even, take);
  rows_times<W, 1>(m, x, B, even, last, take);
}

}  // namespace
