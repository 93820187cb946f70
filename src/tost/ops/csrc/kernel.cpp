// Compiled once per instruction set, with TOST_ISA set to its name; offers the operators for every storage type.
#include "causal_tssa.h"
#include "tssa.h"

// Defines `int name(type, call)` that runs function<storage type, head width>. The common widths are compiled with a
// constant, so that a head's running sums stay in registers; 0 stands for any.
#define TOST_BY_TYPE(name, function, Call)                          \
  int name(int32_t type, const Call& call) {                        \
    switch (type) {                                                 \
      case tost::kFloat:                                            \
        switch (call.shape.D) {                                     \
          case 32: return function<float, 32>(call);                \
          case 48: return function<float, 48>(call);                \
          case 64: return function<float, 64>(call);                \
        }                                                           \
        return function<float, 0>(call);                            \
      case tost::kDouble: return function<double, 0>(call);         \
      case tost::kBfloat16: return function<bfloat16, 0>(call);     \
      case tost::kHalf: return function<half, 0>(call);             \
    }                                                               \
    return tost::kUnknownType;                                      \
  }

// Likewise for function<storage type, head width, block size>. Statistics in blocks are compiled for any width, with the
// sizes kFastBlock and kWideBlock as constants, and for tokens in the type of their statistics only: the caller widens
// others.
#define TOST_BY_BLOCKS(name, function, plain, Call)                 \
  int name(int32_t type, const Call& call) {                        \
    if (call.form.block_size == 1) return plain(type, call);        \
    switch (type) {                                                 \
      case tost::kFloat:                                            \
        if (call.form.block_size == kFastBlock)                     \
          return function<float, 0, kFastBlock>(call);              \
        if (call.form.block_size == kWideBlock)                     \
          return function<float, 0, kWideBlock>(call);              \
        return function<float, 0, 0>(call);                         \
      case tost::kDouble: return function<double, 0, 0>(call);      \
    }                                                               \
    return tost::kUnknownType;                                      \
  }

namespace {
template <class T, int kWidth>
int plain_forward(const tost::Forward& call) {
  return tssa_forward<T, kWidth, 1>(call);
}
template <class T, int kWidth>
int plain_backward(const tost::Backward& call) {
  return tssa_backward<T, kWidth, 1>(call);
}
TOST_BY_TYPE(run_plain_forward, plain_forward, tost::Forward)
TOST_BY_TYPE(run_plain_backward, plain_backward, tost::Backward)
TOST_BY_BLOCKS(run_forward, tssa_forward, run_plain_forward, tost::Forward)
TOST_BY_BLOCKS(run_backward, tssa_backward, run_plain_backward, tost::Backward)
TOST_BY_TYPE(run_causal_forward, causal_forward, tost::CausalForward)
TOST_BY_TYPE(run_causal_backward, causal_backward, tost::CausalBackward)
}  // namespace

const tost::Kernels tost::TOST_JOIN(kernels_, TOST_ISA) = {
    TOST_TEXT(TOST_ISA), &tost::TOST_JOIN(gated_, TOST_ISA),
    run_forward,         run_backward,
    run_causal_forward,  run_causal_backward,
    tost::TOST_JOIN(language_step_, TOST_ISA),
};
