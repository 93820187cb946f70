// What both operators share: work buffers, the real tokens of a chunk, softmax over heads, sums over chunks.
#pragma once

#include <cstdlib>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "library.h"
#include "scalar.h"

namespace {

using tost::Shape;

// See ops/_numerics.py.
constexpr double kSquareFloor = 1e-24, kPrefixFloor = 1e-12, kMassFloor = 1e-8;

inline int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

inline int team_size() {
#ifdef _OPENMP
  return omp_get_num_threads();
#else
  return 1;
#endif
}

// Forking threads costs more than this many elements of work.
inline int useful_threads(int threads, int64_t items, int64_t elements) {
  constexpr int64_t kWorthAThread = 1 << 14;
  int64_t useful = elements / kWorthAThread;
  useful = useful < items ? useful : items;
  useful = useful < threads ? useful : threads;
  return useful > 1 ? int(useful) : 1;
}

// Uninitialized memory that frees itself; `failed()` instead of an exception, because the caller is C.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(count > 0 ? static_cast<T*>(std::malloc(sizeof(T) * count)) : nullptr) {
    failed_ = count > 0 && data_ == nullptr;
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* operator+(int64_t offset) const { return data_ + offset; }
  T& operator[](int64_t index) const { return data_[index]; }
  bool failed() const { return failed_; }

 private:
  T* data_;
  bool failed_;
};

// The tokens of one chunk that the mask keeps, as indices from the chunk's first token.
struct Rows {
  int count = 0, length = 0;
  int index[tost::kChunk];

  Rows(const uint8_t* mask, int64_t batch, int64_t N, int64_t first, int64_t chunk) {
    length = int(first + chunk <= N ? chunk : N - first);
    for (int n = 0; n < length; ++n)
      if (mask == nullptr || mask[batch * N + first + n]) index[count++] = n;
  }
};

template <class T>
inline void fill_zero(T* out, int64_t count) {
  std::memset(static_cast<void*>(out), 0, sizeof(T) * count);
}

// Calls fill(n) for every token of the chunk that the mask leaves out.
template <class Fill>
inline void for_each_masked(const Rows& rows, Fill fill) {
  for (int n = 0, k = 0; n < rows.length; ++n) {
    if (k < rows.count && rows.index[k] == n)
      ++k;
    else
      fill(n);
  }
}

// Softmax over the H entries of every row of x [count, H], in place. One flat loop of exponentials fills the vector
// registers, which a handful of heads would not.
template <class S>
inline void softmax_rows(S* x, int64_t count, int64_t H) {
  for (int64_t k = 0; k < count; ++k) {
    S* const row = x + k * H;
    S largest = row[0];
    for (int64_t h = 1; h < H; ++h) largest = row[h] > largest ? row[h] : largest;
    for (int64_t h = 0; h < H; ++h) row[h] -= largest;
  }
#pragma omp simd
  for (int64_t i = 0; i < count * H; ++i) x[i] = exp_nonpositive(x[i]);
  for (int64_t k = 0; k < count; ++k) {
    S* const row = x + k * H;
    S total = 0;
    for (int64_t h = 0; h < H; ++h) total += row[h];
    const S scale = S(1) / total;
    for (int64_t h = 0; h < H; ++h) row[h] *= scale;
  }
}

// dlogit[h] = pi[h] * (dpi[h] - sum_g pi[g] dpi[g]), in place.
template <class S>
inline void softmax_backward(S* dpi, const S* pi, int64_t count) {
  S mean = 0;
#pragma omp simd reduction(+ : mean)
  for (int64_t i = 0; i < count; ++i) mean += pi[i] * dpi[i];
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) dpi[i] = pi[i] * (dpi[i] - mean);
}

// out[j] += sum over the chunk's rows of w[n, j]^2.
template <class T, class S>
inline void add_squares(const T* w, const Rows& rows, int64_t width, S* out) {
  for (int k = 0; k < rows.count; ++k) {
    const T* row = w + rows.index[k] * width;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const S x = load(row[j]);
      out[j] += x * x;
    }
  }
}

template <class S>
inline void widen(const S* from, int64_t count, double* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = from[j];
}

// The two ways of combining [B, chunks, width] partial sums below run over columns inside a parallel region, and add
// in the order of the chunks: the result does not depend on the number of threads.

constexpr int64_t kColumns = 64;

// total[b, j] = sum_c parts[b, c, j].
template <class S>
inline void total_over_chunks(const double* parts, int64_t B, int64_t chunks, int64_t width, S* total) {
  const int64_t blocks = (width + kColumns - 1) / kColumns;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < B * blocks; ++item) {
    const int64_t b = item / blocks, first = item % blocks * kColumns;
    const int64_t count = first + kColumns <= width ? kColumns : width - first;
    double sum[kColumns] = {};
    for (int64_t c = 0; c < chunks; ++c) {
      const double* part = parts + (b * chunks + c) * width + first;
      for (int64_t j = 0; j < count; ++j) sum[j] += part[j];
    }
    for (int64_t j = 0; j < count; ++j) total[b * width + first + j] = S(sum[j]);
  }
}

// starts[b, c, j] = begin[b, j] + the parts of the chunks that come before c (after c when `reverse`), with
// `stride` numbers from one chunk to the next in starts; end[b, j] = begin[b, j] + all parts. begin may be null.
template <class S>
inline void scan_over_chunks(const double* parts, int64_t B, int64_t chunks, int64_t width, bool reverse,
                             const S* begin, S* starts, int64_t stride, S* end) {
  const int64_t blocks = (width + kColumns - 1) / kColumns;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < B * blocks; ++item) {
    const int64_t b = item / blocks, first = item % blocks * kColumns;
    const int64_t count = first + kColumns <= width ? kColumns : width - first;
    double sum[kColumns];
    for (int64_t j = 0; j < count; ++j) sum[j] = begin ? double(begin[b * width + first + j]) : 0.0;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t c = b * chunks + (reverse ? chunks - 1 - i : i);
      const double* part = parts + c * width + first;
      S* start = starts + c * stride + first;
      for (int64_t j = 0; j < count; ++j) {
        start[j] = S(sum[j]);
        sum[j] += part[j];
      }
    }
    for (int64_t j = 0; j < count; ++j) end[b * width + first + j] = S(sum[j]);
  }
}

}  // namespace
