// Storage types of a tensor and the type in which statistics are computed.
//
// float, bfloat16 and half are computed in float, double in double. The conversions are integer arithmetic without
// branches, so that compilers vectorize them on every instruction set. Everything lives in an unnamed namespace: the
// file is compiled once per instruction set, and no inline function may be shared between those objects.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

template <class T>
struct compute_of {
  using type = float;
};
template <>
struct compute_of<double> {
  using type = double;
};
template <class T>
using compute_t = typename compute_of<T>::type;

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(bfloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float load(half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  // 2^112 moves the exponent bias from half's 15 to float's 127 and is exact for subnormal numbers too.
  const float scaled = as_float(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return as_float(sign | as_bits(scaled) | special);
}

template <class T>
inline T store(compute_t<T> x);
template <>
inline float store<float>(float x) {
  return x;
}
template <>
inline double store<double>(double x) {
  return x;
}
template <>
inline bfloat16 store<bfloat16>(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {uint16_t(is_nan ? 0x7fc0u : rounded)};
}
template <>
inline half store<half>(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias the exponent and round to nearest even on the 13 dropped bits.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 lets the floating point unit do the same rounding.
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // rounds past the largest half
  result = magnitude > 0x7f800000u ? 0x7e00u : result;   // not a number
  return {uint16_t(sign | result)};
}

// exp for arguments <= 0 (a softmax subtracts its maximum), within 2 units in the last place, without a table or a
// branch. Below -87 the result would be subnormal and is as good as 0 beside the maximum's 1.
inline float exp_nonpositive(float x) {
  x = x < -87.0f ? -87.0f : x;
  const int32_t n = int32_t(x * 1.44269504f - 0.5f);  // x / ln 2, rounded to nearest as x <= 0
  // In double the remainder needs no second part of ln 2, which reassociation could merge with the first.
  const float r = float(double(x) - double(n) * 0.693147180559945309);
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * as_float(uint32_t(n + 127) << 23);
}
inline double exp_nonpositive(double x) { return std::exp(x); }

}  // namespace
