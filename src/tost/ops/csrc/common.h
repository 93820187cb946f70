// What both operators share: work buffers, the real tokens of a chunk, softmax over heads, sums over chunks.
#pragma once

#include <cstddef>
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
  explicit Buffer(int64_t count) : data_(count > 0 ? static_cast<T*>(allocate(sizeof(T) * count)) : nullptr) {
    failed_ = count > 0 && data_ == nullptr;
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* operator+(int64_t offset) const { return data_ + offset; }
  T& operator[](int64_t index) const { return data_[index]; }
  bool failed() const { return failed_; }

 private:
  // Registers need more than malloc promises.
  static void* allocate(size_t bytes) {
    return alignof(T) > alignof(std::max_align_t) ? std::aligned_alloc(alignof(T), bytes) : std::malloc(bytes);
  }

  T* data_;
  bool failed_;
};

// How the tokens of a call are cut into sequences, and these into chunks: the items of parallel work, in order. Tokens
// are numbered through all rows. A sequence that is packed with others has the chunks that it would have alone.
class Layout {
 public:
  Layout(const Shape& shape, int64_t sequences, const int64_t* cu_seqlens, int64_t chunk)
      : sequences(sequences),
        cu_seqlens_(cu_seqlens),
        N_(shape.N),
        chunk_(chunk),
        chunks_((shape.N + chunk - 1) / chunk),
        bounds_(cu_seqlens ? sequences + 1 : 0),
        owners_(cu_seqlens ? shape.N / chunk + sequences : 0) {
    items = sequences * chunks_;
    if (!cu_seqlens || failed() || !valid()) return;
    items = 0;
    for (int64_t b = 0; b < sequences; ++b) {
      bounds_[b] = items;
      for (int64_t first = begin(b); first < end(b); first += chunk) owners_[items++] = b;
    }
    bounds_[sequences] = items;
  }
  bool failed() const { return bounds_.failed() || owners_.failed(); }
  // Whether cu_seqlens goes from 0 to N and never back: nothing else may be read.
  bool valid() const {
    if (!cu_seqlens_) return true;
    if (sequences < 0 || cu_seqlens_[0] != 0 || cu_seqlens_[sequences] != N_) return false;
    for (int64_t b = 0; b < sequences; ++b)
      if (begin(b) > end(b)) return false;
    return true;
  }
  // The tokens of a sequence, and its chunks: from this one up to that of the next sequence.
  int64_t begin(int64_t b) const { return cu_seqlens_ ? cu_seqlens_[b] : b * N_; }
  int64_t end(int64_t b) const { return cu_seqlens_ ? cu_seqlens_[b + 1] : (b + 1) * N_; }
  int64_t first_chunk(int64_t b) const { return cu_seqlens_ ? bounds_[b] : b * chunks_; }
  // The sequence of a chunk, its first token, and how many it has.
  int64_t sequence(int64_t item) const { return cu_seqlens_ ? owners_[item] : item / chunks_; }
  int64_t token(int64_t item) const {
    const int64_t b = sequence(item);
    return begin(b) + (item - first_chunk(b)) * chunk_;
  }
  int64_t length(int64_t item) const {
    const int64_t left = end(sequence(item)) - token(item);
    return left < chunk_ ? left : chunk_;
  }
  // The token's place in its row.
  int64_t column(int64_t token, int64_t b) const { return cu_seqlens_ ? token : token - b * N_; }

  const int64_t sequences;
  int64_t items;

 private:
  const int64_t* const cu_seqlens_;
  const int64_t N_, chunk_, chunks_;
  Buffer<int64_t> bounds_, owners_;
};

// The tokens of one chunk that the mask keeps, as indices from the chunk's first token.
struct Rows {
  int count = 0, length = 0;
  int index[tost::kChunk];

  Rows(const uint8_t* mask, int64_t token, int64_t length) : length(int(length)) {
    for (int n = 0; n < this->length; ++n)
      if (mask == nullptr || mask[token + n]) index[count++] = n;
  }
};

// One item of a layout.
struct Chunk {
  int64_t b, token, column;  // sequence, first token, its place in its row
  Rows rows;
  Chunk(const Layout& layout, const uint8_t* mask, int64_t item)
      : b(layout.sequence(item)),
        token(layout.token(item)),
        column(layout.column(token, b)),
        rows(mask, token, layout.length(item)) {}
  // The k-th real token.
  int64_t row(int k) const { return token + rows.index[k]; }
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

// The two ways of combining [items, width] partial sums below run over sequences and columns inside a parallel region,
// and add in the order of the chunks: the result does not depend on the number of threads.

constexpr int64_t kColumns = 64;

// total[b, j] = the sum of parts[c, j] over the chunks of sequence b.
template <class S>
inline void total_over_chunks(const Layout& layout, const double* parts, int64_t width, S* total) {
  const int64_t blocks = (width + kColumns - 1) / kColumns;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < layout.sequences * blocks; ++item) {
    const int64_t b = item / blocks, first = item % blocks * kColumns;
    const int64_t count = first + kColumns <= width ? kColumns : width - first;
    double sum[kColumns] = {};
    for (int64_t c = layout.first_chunk(b); c < layout.first_chunk(b + 1); ++c) {
      const double* part = parts + c * width + first;
      for (int64_t j = 0; j < count; ++j) sum[j] += part[j];
    }
    for (int64_t j = 0; j < count; ++j) total[b * width + first + j] = S(sum[j]);
  }
}

// starts[c, j] = begin[b, j] + the parts of the chunks of sequence b that come before c (after c when `reverse`), with
// `stride` numbers from one chunk to the next in starts; end[b, j] = begin[b, j] + all its parts. begin may be null.
template <class S>
inline void scan_over_chunks(const Layout& layout, const double* parts, int64_t width, bool reverse, const S* begin,
                             S* starts, int64_t stride, S* end) {
  const int64_t blocks = (width + kColumns - 1) / kColumns;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < layout.sequences * blocks; ++item) {
    const int64_t b = item / blocks, first = item % blocks * kColumns;
    const int64_t count = first + kColumns <= width ? kColumns : width - first;
    double sum[kColumns];
    for (int64_t j = 0; j < count; ++j) sum[j] = begin ? double(begin[b * width + first + j]) : 0.0;
    const int64_t before = layout.first_chunk(b), after = layout.first_chunk(b + 1);
    for (int64_t i = before; i < after; ++i) {
      const int64_t c = reverse ? before + after - 1 - i : i;
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
