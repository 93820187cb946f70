// Compiled once per instruction set like kernel.cpp, apart from it: a step of a language model for every type of matrices.
#include "step.h"

int tost::TOST_JOIN(language_step_, TOST_ISA)(int32_t type, const Step& step) {
  switch (type) {
    case kFloat: return language_step<float>(step);
    case kBfloat16: return language_step<bfloat16>(step);
    case kInt8: return language_step<int8_t>(step);
  }
  return kUnknownType;
}
