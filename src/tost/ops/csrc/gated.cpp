// Compiled once per instruction set like kernel.cpp, apart from it: gated statistics.
#include "gated.h"

// Defines `int name(type, call)` that runs function<blocks>: of one feature, of the size that is compiled as a constant, or
// of any.
#define TOST_BY_BLOCKS(name, function, Call)                                         \
  int name(int32_t type, const Call& call) {                                         \
    const int64_t g = call.block_size;                                               \
    switch (type) {                                                                  \
      case tost::kFloat:                                                             \
        if (g == 1) return function<Singles<float>>(call);                           \
        if (g == kFastBlock) return function<Blocks<float, kFastBlock>>(call);       \
        return function<Blocks<float, 0>>(call);                                     \
      case tost::kDouble:                                                            \
        if (g == 1) return function<Singles<double>>(call);                          \
        return function<Blocks<double, 0>>(call);                                    \
    }                                                                                \
    return tost::kUnknownType;                                                       \
  }

namespace {
TOST_BY_BLOCKS(run_forward, gated_forward, tost::GatedForward)
TOST_BY_BLOCKS(run_backward, gated_backward, tost::GatedBackward)
}  // namespace

const tost::GatedKernels tost::TOST_JOIN(gated_, TOST_ISA) = {run_forward, run_backward};
