// Sums that forget: total[n] = a total[n-1] + x[n], where a is a number in (0, 1] for every head.
//
// Powers of a come from a table of one chunk, made in double. One that leaves the range of the statistics is a zero, so
// that what has long been forgotten does not drag subnormal numbers along.
#pragma once

#include <cfloat>

#include "common.h"

namespace {

// x times the k-th entry of a table of powers; without decay x itself.
template <bool kDecay, class X, class S>
inline X faded(X x, const S* power, int k) {
  if constexpr (kDecay)
    return x * X(power[k]);
  else
    return x;
}

// The powers a^0 ... a^chunk of every head, and by how many tokens each chunk makes the sums fade.
template <class S, bool kDecay>
class Fading {
 public:
  Fading(const S* decay, int64_t H, const uint8_t* mask, const Layout& layout)
      : powers_(kDecay ? H * kRow : 0), exact_(kDecay ? H * kRow : 0), counts_(kDecay ? layout.items : 0) {
    if (!kDecay || failed()) return;
    constexpr double smallest = sizeof(S) == sizeof(double) ? DBL_MIN : double(FLT_MIN);
    for (int64_t h = 0; h < H; ++h) {
      double power = 1;
      for (int64_t k = 0; k < kRow; ++k, power *= double(decay[h])) {
        exact_[h * kRow + k] = power < DBL_MIN ? 0.0 : power;
        powers_[h * kRow + k] = power < smallest ? S(0) : S(power);
      }
    }
    for (int64_t item = 0; item < layout.items; ++item) counts_[item] = Chunk(layout, mask, item).rows.count;
  }
  bool failed() const { return powers_.failed() || exact_.failed() || counts_.failed(); }
  // The powers of one head.
  const S* of(int64_t h) const { return kDecay ? powers_ + h * kRow : nullptr; }
  // By how much the sums of a head fade over one chunk.
  double over(int64_t item, int64_t h) const { return exact_[h * kRow + counts_[item]]; }

 private:
  static constexpr int64_t kRow = tost::kCausalChunk + 1;
  Buffer<S> powers_;
  Buffer<double> exact_;
  Buffer<int> counts_;
};

// As scan_over_chunks in common.h, for parts [items, H, width], but what comes from before a chunk (from after it
// when `reverse`) fades over it. Without decay it is scan_over_chunks.
template <class S, bool kDecay>
inline void carry_over_chunks(const Layout& layout, const Fading<S, kDecay>& fading, const double* parts, int64_t H,
                              int64_t width, bool reverse, const S* begin, S* starts, int64_t stride, S* end) {
  if constexpr (!kDecay) {
    scan_over_chunks(layout, parts, H * width, reverse, begin, starts, stride, end);
  } else {
#pragma omp for schedule(static)
    for (int64_t item = 0; item < layout.sequences * H; ++item) {
      const int64_t b = item / H, h = item % H;
      for (int64_t first = 0; first < width; first += kColumns) {
        const int64_t count = first + kColumns <= width ? kColumns : width - first, at = h * width + first;
        double sum[kColumns];
        for (int64_t j = 0; j < count; ++j) sum[j] = begin ? double(begin[b * H * width + at + j]) : 0.0;
        const int64_t before = layout.first_chunk(b), after = layout.first_chunk(b + 1);
        for (int64_t i = before; i < after; ++i) {
          const int64_t c = reverse ? before + after - 1 - i : i;
          const double kept = fading.over(c, h);
          for (int64_t j = 0; j < count; ++j) {
            starts[c * stride + at + j] = S(sum[j]);
            sum[j] = kept * sum[j] + parts[c * H * width + at + j];
          }
        }
        for (int64_t j = 0; j < count; ++j) end[b * H * width + at + j] = S(sum[j]);
      }
    }
  }
}

// out = a out + w^2 for the real rows of a chunk, one after the other.
template <class T, int kWidth, class S, bool kDecay>
inline void add_fading_squares(const T* w, const Rows& rows, int64_t H, int64_t width,
                               const Fading<S, kDecay>& fading, S* out) {
  const int64_t D = kWidth ? kWidth : width;
  for (int k = 0; k < rows.count; ++k) {
    const T* row = w + rows.index[k] * H * D;
    for (int64_t h = 0; h < H; ++h) {
      const S a = fading.of(h)[1];
#pragma omp simd
      for (int64_t j = h * D; j < (h + 1) * D; ++j) {
        const S x = load(row[j]);
        out[j] = a * out[j] + x * x;
      }
    }
  }
}

// out = a out + pi w^2 likewise; weight[k, h] holds pi.
template <class T, int kWidth, class S, bool kDecay>
inline void add_fading_weighted_squares(const T* w, const Rows& rows, int64_t H, int64_t width, const S* weight,
                                        const Fading<S, kDecay>& fading, S* out) {
  const int64_t D = kWidth ? kWidth : width;
  for (int k = 0; k < rows.count; ++k) {
    const T* row = w + rows.index[k] * H * D;
    for (int64_t h = 0; h < H; ++h) {
      const S a = fading.of(h)[1], p = weight[k * H + h];
#pragma omp simd
      for (int64_t j = h * D; j < (h + 1) * D; ++j) {
        const S x = load(row[j]);
        out[j] = a * out[j] + p * (x * x);
      }
    }
  }
}

// sum_d bar[d] before[d], where bar = faded later + tail: a token's part of the gradient of a.
template <class S>
inline S bars_times(int64_t D, const S* later, S power, const S* tail, const S* before) {
  S sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < D; ++d) sum += (later[d] * power + tail[d]) * before[d];
  return sum;
}

}  // namespace
