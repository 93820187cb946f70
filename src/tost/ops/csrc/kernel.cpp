// Compiled once per instruction set, with TOST_ISA set to its name; offers the operators for every storage type.
#include "causal_tssa.h"
#include "tssa.h"

// Defines `int name(type, call)` that runs function<storage type, head width, block size>. The common widths are compiled
// with a constant, so that a head's running sums stay in registers; 0 stands for any. Statistics in blocks are compiled
// for any width, with the size kFastBlock or Wide as a constant, and for tokens in the type of their statistics only: the
// caller widens others.
#define TOST_BY_TYPE(name, function, Call, Wide)                    \
  int name(int32_t type, const Call& call) {                        \
    if (call.form.block_size > 1) {                                 \
      switch (type) {                                               \
        case tost::kFloat:                                          \
          if (call.form.block_size == kFastBlock)                   \
            return function<float, 0, kFastBlock>(call);            \
          if (call.form.block_size == Wide)                         \
            return function<float, 0, Wide>(call);                  \
          return function<float, 0, 0>(call);                       \
        case tost::kDouble: return function<double, 0, 0>(call);    \
      }                                                             \
      return tost::kUnknownType;                                    \
    }                                                               \
    switch (type) {                                                 \
      case tost::kFloat:                                            \
        switch (call.shape.D) {                                     \
          case 32: return function<float, 32, 1>(call);             \
          case 48: return function<float, 48, 1>(call);             \
          case 64: return function<float, 64, 1>(call);             \
        }                                                           \
        return function<float, 0, 1>(call);                         \
      case tost::kDouble: return function<double, 0, 1>(call);      \
      case tost::kBfloat16: return function<bfloat16, 0, 1>(call);  \
      case tost::kHalf: return function<half, 0, 1>(call);          \
    }                                                               \
    return tost::kUnknownType;                                      \
  }

namespace {
TOST_BY_TYPE(run_forward, tssa_forward, tost::Forward, kWideBlock)
TOST_BY_TYPE(run_backward, tssa_backward, tost::Backward, kWideBlock)
TOST_BY_TYPE(run_causal_forward, causal_forward, tost::CausalForward, kFastBlock)
TOST_BY_TYPE(run_causal_backward, causal_backward, tost::CausalBackward, kFastBlock)
}  // namespace

const tost::Kernels tost::TOST_JOIN(kernels_, TOST_ISA) = {
    TOST_TEXT(TOST_ISA), &tost::TOST_JOIN(content_, TOST_ISA),
    run_forward,         run_backward,
    run_causal_forward,  run_causal_backward,
    tost::TOST_JOIN(language_step_, TOST_ISA),
};
