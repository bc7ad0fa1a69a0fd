#include "cadre/collective/reduce.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cadre/collective/reduce_kernels.h"

namespace cadre {
namespace {

using kernels::Fold;

InstructionSet detect_instruction_set() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

// One function per instruction set. Not target_clones: its ifunc resolvers run before a sanitizer's
// runtime is ready.
template <typename Kernel>
void run_baseline(const Fold& fold) {
  Kernel::run(fold);
}

#if defined(__x86_64__)
template <typename Kernel>
[[gnu::target("avx2")]] void run_avx2(const Fold& fold) {
  Kernel::run(fold);
}

template <typename Kernel>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] void run_avx512(
    const Fold& fold) {
  Kernel::run(fold);
}
#endif

template <typename Lanes, typename Op, typename Finish = kernels::AsIs>
void run(const Fold& fold, InstructionSet set) {
  using Kernel = kernels::Kernel<Lanes, Op, Finish>;
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return run_avx512<Kernel>(fold);
  if (set == InstructionSet::kAvx2) return run_avx2<Kernel>(fold);
#else
  static_cast<void>(set);
#endif
  run_baseline<Kernel>(fold);
}

// Sums of integers wrap, which only unsigned types may do; MIN and MAX need the sign.
template <typename T>
void run_integer(const Fold& fold, ReduceOp op, InstructionSet set) {
  switch (op) {
    case ReduceOp::kMin:
      return run<kernels::Lanes<T>, kernels::Min>(fold, set);
    case ReduceOp::kMax:
      return run<kernels::Lanes<T>, kernels::Max>(fold, set);
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return run<kernels::Lanes<std::make_unsigned_t<T>>, kernels::Sum>(fold, set);
  }
}

template <typename Lanes>
void run_floating(const Fold& fold, ReduceOp op, InstructionSet set) {
  switch (op) {
    case ReduceOp::kSum:
      return run<Lanes, kernels::Sum>(fold, set);
    case ReduceOp::kAvg:
      return run<Lanes, kernels::Sum, kernels::DivideByNumInputs>(fold, set);
    case ReduceOp::kMin:
      return run<Lanes, kernels::Min>(fold, set);
    case ReduceOp::kMax:
      return run<Lanes, kernels::Max>(fold, set);
  }
}

void run_any(const Fold& fold, ReduceKind kind, InstructionSet set) {
  switch (kind.dtype) {
    case DType::kUint8:
      return run_integer<uint8_t>(fold, kind.op, set);
    case DType::kInt32:
      return run_integer<int32_t>(fold, kind.op, set);
    case DType::kInt64:
      return run_integer<int64_t>(fold, kind.op, set);
    case DType::kBfloat16:
      return run_floating<kernels::Bfloat16Lanes>(fold, kind.op, set);
    case DType::kFloat32:
      return run_floating<kernels::Lanes<float>>(fold, kind.op, set);
    case DType::kFloat64:
      return run_floating<kernels::Lanes<double>>(fold, kind.op, set);
  }
}

// Through a block that stays in the first-level cache: one kernel serves both ways to store.
void run_streaming(const Fold& fold, ReduceKind kind, InstructionSet set) {
  constexpr size_t kBlockBytes = 4096;
  constexpr size_t kMaxInputs = 64;
  alignas(64) std::array<std::byte, kBlockBytes> block;
  std::array<const std::byte*, kMaxInputs> moved;
  if (fold.num_inputs > kMaxInputs) return run_any(fold, kind, set);
  const size_t element = size_of(kind.dtype);
  for (size_t done = 0; done < fold.count; done += kBlockBytes / element) {
    const size_t count = std::min(kBlockBytes / element, fold.count - done);
    for (size_t r = 0; r < fold.num_inputs; ++r) moved[r] = fold.inputs[r] + done * element;
    run_any({block.data(), moved.data(), fold.num_inputs, count}, kind, set);
    copy(fold.out + done * element, block.data(), count * element, StorePolicy::kStreaming);
  }
}

}  // namespace

InstructionSet best_instruction_set() {
  static const InstructionSet best = detect_instruction_set();
  return best;
}

void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, ReduceKind kind,
            const ReduceOptions& options) {
  if (count == 0) return;
  if (inputs.size() == 1) {
    if (out != inputs[0]) copy(out, inputs[0], count * size_of(kind.dtype), options.stores);
    return;
  }
  const Fold fold{out, inputs.data(), inputs.size(), count};
  if (options.stores == StorePolicy::kStreaming) {
    run_streaming(fold, kind, options.instruction_set);
  } else {
    run_any(fold, kind, options.instruction_set);
  }
}

}  // namespace cadre
