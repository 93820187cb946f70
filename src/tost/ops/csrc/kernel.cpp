// Compiled once per instruction set, with TOST_ISA set to its name; offers the operators for every storage type.
#include "causal_tssa.h"
#include "tssa.h"

#define TOST_JOIN_(a, b) a##b
#define TOST_JOIN(a, b) TOST_JOIN_(a, b)
#define TOST_TEXT_(a) #a
#define TOST_TEXT(a) TOST_TEXT_(a)

// Defines `int name(type, call)` that runs function<storage type>.
#define TOST_BY_TYPE(name, function, Call)               \
  int name(int32_t type, const Call& call) {             \
    switch (type) {                                      \
      case tost::kFloat: return function<float>(call);   \
      case tost::kDouble: return function<double>(call); \
      case tost::kBfloat16: return function<bfloat16>(call); \
      case tost::kHalf: return function<half>(call);     \
    }                                                    \
    return 2;                                            \
  }

namespace {
TOST_BY_TYPE(run_forward, tssa_forward, tost::Forward)
TOST_BY_TYPE(run_backward, tssa_backward, tost::Backward)
TOST_BY_TYPE(run_causal_forward, causal_forward, tost::CausalForward)
TOST_BY_TYPE(run_causal_backward, causal_backward, tost::CausalBackward)
}  // namespace

const tost::Kernels tost::TOST_JOIN(kernels_, TOST_ISA) = {
    TOST_TEXT(TOST_ISA), run_forward, run_backward, run_causal_forward, run_causal_backward,
};
