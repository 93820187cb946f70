// The plain C interface: picks the instruction set once and forwards calls to it.
#include "library.h"

#include <cstring>

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define TOST_API extern "C" __attribute__((visibility("default")))

namespace tost {
namespace {

bool processor_has(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (std::strcmp(name, "avx512") == 0)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return std::strcmp(name, "baseline") == 0;
}

const Kernels* const compiled[] = {
#ifdef TOST_HAVE_AVX512
    &kernels_avx512,
#endif
#ifdef TOST_HAVE_AVX2
    &kernels_avx2,
#endif
    &kernels_baseline,
};

const Kernels* best() {
  for (const Kernels* candidate : compiled)
    if (processor_has(candidate->name)) return candidate;
  return &kernels_baseline;
}

const Kernels* active = best();

}  // namespace
}  // namespace tost

// Name of the i-th compiled instruction set, best first, or null past the end.
TOST_API const char* tost_compiled_isa(int32_t i) {
  const int32_t count = sizeof tost::compiled / sizeof *tost::compiled;
  return i >= 0 && i < count ? tost::compiled[i]->name : nullptr;
}

TOST_API const char* tost_active_isa() { return tost::active->name; }

// Makes `name` (or "auto") the active instruction set. Returns 0, 1 if it was not compiled, 2 if the processor lacks it.
TOST_API int32_t tost_select_isa(const char* name) {
  if (std::strcmp(name, "auto") == 0) {
    tost::active = tost::best();
    return 0;
  }
  for (const tost::Kernels* candidate : tost::compiled) {
    if (std::strcmp(candidate->name, name) != 0) continue;
    if (!tost::processor_has(name)) return 2;
    tost::active = candidate;
    return 0;
  }
  return 1;
}

// Whether the processor announces AMX but does not describe its tiles, as in some virtual machines.
TOST_API int32_t tost_amx_is_broken() {
#ifdef __x86_64__
  unsigned a, b, c, d;
  const bool announced = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1);
  return announced && !(__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) && a > 0);
#else
  return 0;
#endif
}

TOST_API const char* tost_compiler() { return __VERSION__; }

TOST_API int32_t tost_has_openmp() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// Sizes of the calls in the order of their functions below, 0 past the end: a caller built from other sources differs.
TOST_API int64_t tost_call_size(int32_t i) {
  const int64_t sizes[] = {sizeof(tost::Forward), sizeof(tost::Backward), sizeof(tost::CausalForward),
                           sizeof(tost::CausalBackward), sizeof(tost::GatedForward), sizeof(tost::GatedBackward), sizeof(tost::Step),
                           sizeof(tost::StepLayer)};
  return i >= 0 && i < 8 ? sizes[i] : 0;
}

// Names of the fields of Form, separated by spaces.
TOST_API const char* tost_form() {
#define TOST_FIELD(name) #name " "
  return TOST_FORM(TOST_FIELD);
#undef TOST_FIELD
}

TOST_API int64_t tost_causal_chunk() { return tost::kCausalChunk; }

// Runs one pass of the active instruction set.
#define TOST_RUN(name, table, pass, Call) \
  TOST_API int32_t name(int32_t type, const tost::Call* call) { return tost::active->table pass(type, *call); }

TOST_RUN(tost_tssa_forward, , forward, Forward)
TOST_RUN(tost_tssa_backward, , backward, Backward)
TOST_RUN(tost_causal_tssa_forward, , causal_forward, CausalForward)
TOST_RUN(tost_causal_tssa_backward, , causal_backward, CausalBackward)
TOST_RUN(tost_gated_forward, gated->, forward, GatedForward)
TOST_RUN(tost_gated_backward, gated->, backward, GatedBackward)
TOST_RUN(tost_language_step, , step, Step)
