#include "cadre/collective/instruction_set.h"

namespace cadre {
namespace {

InstructionSet detect() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

}  // namespace

InstructionSet best_instruction_set() {
  static const InstructionSet best = detect();
  return best;
}

}  // namespace cadre
