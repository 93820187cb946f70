// Compiled once per instruction set like kernel.cpp, apart from it: the operators about means, or with decays from the
// data, for tokens in the type of their statistics.
#include "centered.h"
#include "flow.h"
#include "gated.h"

// Defines `int name(type, call)` that runs function<blocks>: of one feature, of the size that is compiled as a constant, or
// of any.
#define TOST_BY_BLOCKS(name, function, Call)                                         \
  int name(int32_t type, const Call& call) {                                         \
    const int64_t g = block_size_of(call);                                           \
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
template <class Call>
int64_t block_size_of(const Call& call) {
  return call.form.block_size;
}
int64_t block_size_of(const tost::GatedForward& call) { return call.block_size; }
int64_t block_size_of(const tost::GatedBackward& call) { return call.block_size; }
TOST_BY_BLOCKS(run_gated_forward, gated_forward, tost::GatedForward)
TOST_BY_BLOCKS(run_gated_backward, gated_backward, tost::GatedBackward)
TOST_BY_BLOCKS(run_forward, centered_forward, tost::Forward)
TOST_BY_BLOCKS(run_backward, centered_backward, tost::Backward)
TOST_BY_BLOCKS(run_causal_forward, flow_forward, tost::CausalForward)
TOST_BY_BLOCKS(run_causal_backward, flow_backward, tost::CausalBackward)
}  // namespace

const tost::ContentKernels tost::TOST_JOIN(content_, TOST_ISA) = {run_forward, run_backward, run_causal_forward,
                                                                  run_causal_backward, run_gated_forward,
                                                                  run_gated_backward};
