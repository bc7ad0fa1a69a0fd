#include "cadre/core/collective/instruction_set.h"

namespace cadre {
namespace {

#if defined(__x86_64__)
// Returns whether the CPU has the F16C instructions, which convert float16. clang cannot test for
// them, and kernels that are compiled with clang do not use them.
bool has_float16_conversions() {
#if defined(__clang__)
  return true;
#else
  return __builtin_cpu_supports("f16c") != 0;
#endif
}
#endif

InstructionSet detect() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && has_float16_conversions()) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

}  // namespace

InstructionSet best_instruction_set() {
  static const InstructionSet best = detect();
  return best;
}

}  // namespace cadre
