// Says which vector instructions this CPU has, and calls the kernels that are compiled for them.
//
// Threads: any. Blocking: never. Errors: none. All sets give the same bits.
#pragma once

#include "cadre/core/base/export.h"

namespace cadre {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// Returns the widest set that this CPU has.
CADRE_EXPORT InstructionSet best_instruction_set();

namespace kernels {

// One function for each instruction set. target_clones is not used: its ifunc resolvers run before
// a sanitizer's runtime is ready. Kernel::run is always inlined.
template <typename Kernel, typename Work>
void run_baseline(const Work& work) {
  Kernel::template run<InstructionSet::kBaseline>(work);
}

#if defined(__x86_64__)
template <typename Kernel, typename Work>
[[gnu::target("avx2,f16c")]] void run_avx2(const Work& work) {
  Kernel::template run<InstructionSet::kAvx2>(work);
}

#if defined(__clang__)  // clang has no such option, and is used for builds with sanitizers only
#define CADRE_FULL_WIDTH ""
#else
#define CADRE_FULL_WIDTH ",prefer-vector-width=512"
#endif

template <typename Kernel, typename Work>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl" CADRE_FULL_WIDTH)]] void run_avx512(
    const Work& work) {
  Kernel::template run<InstructionSet::kAvx512>(work);
}

#undef CADRE_FULL_WIDTH
#endif

template <typename Kernel, typename Work>
void run_with(InstructionSet set, const Work& work) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return run_avx512<Kernel>(work);
  if (set == InstructionSet::kAvx2) return run_avx2<Kernel>(work);
#else
  static_cast<void>(set);
#endif
  run_baseline<Kernel>(work);
}

}  // namespace kernels
}  // namespace cadre
