// The calls that Python makes, and the table through which one instruction set offers them.
//
// Layout: w, y, dy, dw are [B, N, H, D] contiguous in the tensor's type; pi, denergy are [B, N, H] and sums are
// [B, H, D] or [B, H], all in the type of the statistics (float, or double for double tensors). mask is [B, N] bytes,
// non-zero for a real token, or null. With form.block_size = g > 1, which divides D, sums of weighted squares hold
// products of features, D (g + 1) / 2 numbers per head in place of D: see block.h. A call returns a Status.
//
// `sequences` is B and cu_seqlens null where each row is a sequence. Packed sequences follow each other in one row, B = 1;
// cu_seqlens [sequences + 1] is where they begin, and N. Sums then have `sequences` entries in place of B.
#pragma once

#include <cstdint>

#define TOST_JOIN_(a, b) a##b
#define TOST_JOIN(a, b) TOST_JOIN_(a, b)
#define TOST_TEXT_(a) #a
#define TOST_TEXT(a) TOST_TEXT_(a)

namespace tost {

enum Status : int32_t { kDone = 0, kNoMemory = 1, kUnknownType = 2, kBadSequences = 3 };
enum Type : int32_t { kFloat = 0, kDouble = 1, kBfloat16 = 2, kHalf = 3, kInt8 = 4 };

// Tokens per unit of parallel work. They do not depend on the number of threads, so neither does any result.
constexpr int64_t kChunk = 128;
constexpr int64_t kCausalChunk = 64;

struct Shape {
  int64_t B, N, H, D;
};

// What a call may vary: the fields of Form in ops/form.py, in their order. A new one is one more entry here.
#define TOST_FORM(FIELD) FIELD(block_size) FIELD(normalize)

struct Form {
#define TOST_FIELD(name) int32_t name;
  TOST_FORM(TOST_FIELD)
#undef TOST_FIELD
};

// y may be w itself. pi and the three sums may be null if the caller does not keep them.
struct Forward {
  int32_t threads;
  Form form;
  Shape shape;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const void *w, *temperature;
  const uint8_t* mask;
  void *y, *pi, *squares, *weighted, *mass;
};

struct Backward {
  int32_t threads;
  Form form;
  Shape shape;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const void *w, *temperature;
  const uint8_t* mask;
  const void *dy, *pi, *squares, *weighted, *mass;
  void *dw, *dtemperature;
};

// bias holds [N, H] numbers per batch entry, bias_stride apart (0 to share them), or is null. starts receives the three
// sums before every chunk, one after the other, [B, chunks, 2HD + H]: what the backward pass needs to replay a chunk. It
// and pi may be null if the caller does not keep them, and y may be w itself.
struct CausalForward {
  int32_t threads;
  Shape shape;
  int64_t sequences;
  const int64_t* cu_seqlens;
  int64_t bias_stride;
  const void *w, *temperature, *bias;
  const uint8_t* mask;
  const void *squares_in, *weighted_in, *mass_in;  // null for an empty state
  void *y, *pi, *starts, *squares, *weighted, *mass;
};

struct CausalBackward {
  int32_t threads;
  Shape shape;
  int64_t sequences;
  const int64_t* cu_seqlens;
  int64_t bias_stride;
  const void *w, *temperature, *bias;
  const uint8_t* mask;
  const void *dy, *dsquares, *dweighted, *dmass;  // the last three are null for zeros
  const void *pi, *starts;
  void *dw, *dtemperature, *denergy, *dsquares_in, *dweighted_in, *dmass_in;
};

// Gated statistics, see gated.h. write [B, N, H, D / g] holds the gates, in [0, 1]. The
// state is a mean [B, H, D] and packed covariances [B, H, D (g + 1) / 2]; everything is in one type. The states before
// are null for zeros.
struct GatedForward {
  int32_t threads;
  int64_t block_size;
  Shape shape;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const void *w, *write;
  const uint8_t* mask;
  const void *mean_in, *covariance_in;
  void *y, *mean_out, *covariance_out;
};

// dmean_out and dcovariance_out are null for zeros.
struct GatedBackward {
  int32_t threads;
  int64_t block_size;
  Shape shape;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const void *w, *write;
  const uint8_t* mask;
  const void *mean_in, *covariance_in;
  const void *dy, *dmean_out, *dcovariance_out;
  void *dw, *dwrite, *dmean_in, *dcovariance_in;
};

// W [rows, columns], contiguous in the type that the call names; scale [rows] multiplies the rows, bias [rows] is added.
// Both may be null.
struct Matrix {
  const void* weight;
  const float *scale, *bias;
  int64_t rows, columns;
};

struct Norm {
  const float *weight, *bias;  // [C]; bias may be null
  float eps;
};

// A causal convolution: taps [width, C], or null for none; the window is [B, width - 1, C], before and after the step.
struct Convolution {
  const float *taps, *window_in;
  float* window;
  int64_t width;
};

// A block. bias (a table [H, bias_length]), gamma1 and gamma2 may be null. The sums are those of CausalForward, before and
// after the step. With a write gate, mean, covariance and mass of gated statistics in blocks of block_size take their
// places, and gate and heads are set; heads norms the outputs of every head by their root mean square.
struct StepLayer {
  Norm norm1, norm2, heads;
  Convolution conv, conv_mlp;
  Matrix in, write, gate, out, mlp_in, mlp_out;
  const float *temperature, *bias, *gamma1, *gamma2;
  const float *squares_in, *weighted_in, *mass_in;
  float *squares, *weighted, *mass;
  int64_t block_size;
  int32_t tanh;
};

// One token per sequence, x [B, C] after the embedding, overwritten, to logits [B, V]. position [B] counts the tokens
// before it; place [B] is its column in the tables of biases.
struct Step {
  int32_t threads;
  int64_t B, C, H, hidden, depth, bias_length;
  const int64_t *position, *place;
  const StepLayer* layers;
  Norm norm;
  Matrix head;
  float *x, *logits;
};

struct GatedKernels {
  int (*forward)(int32_t type, const GatedForward&);
  int (*backward)(int32_t type, const GatedBackward&);
};

struct Kernels {
  const char* name;
  const GatedKernels* gated;
  int (*forward)(int32_t type, const Forward&);
  int (*backward)(int32_t type, const Backward&);
  int (*causal_forward)(int32_t type, const CausalForward&);
  int (*causal_backward)(int32_t type, const CausalBackward&);
  int (*step)(int32_t type, const Step&);
};

int language_step_avx512(int32_t type, const Step&);
int language_step_avx2(int32_t type, const Step&);
int language_step_baseline(int32_t type, const Step&);
extern const GatedKernels gated_avx512, gated_avx2, gated_baseline;
extern const Kernels kernels_avx512, kernels_avx2, kernels_baseline;

}  // namespace tost
