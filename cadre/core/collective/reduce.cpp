#include "cadre/core/collective/reduce.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cadre/core/collective/reduce_kernels.h"

namespace cadre {
namespace {

using kernels::Fold;

template <typename Lanes, typename Op, typename Finish = kernels::AsIs>
void run(const Fold& fold, InstructionSet set) {
  kernels::run_with<kernels::Kernel<Lanes, Op, Finish>>(set, fold);
}

// Runs bitwise operations on whole bytes, whatever the width of the integers.
template <typename Op>
void run_bits(const Fold& fold, size_t element_bytes, InstructionSet set) {
  Fold bytes = fold;
  bytes.count *= element_bytes;
  run<kernels::Lanes<uint8_t>, Op>(bytes, set);
}

// Sums and products of integers wrap, which is defined for unsigned types only; MIN and MAX need
// the sign.
template <typename T>
void run_integer(const Fold& fold, ReduceOp op, InstructionSet set) {
  using Unsigned = kernels::Lanes<std::make_unsigned_t<T>>;
  switch (op) {
    case ReduceOp::kMin:
      return run<kernels::Lanes<T>, kernels::Min>(fold, set);
    case ReduceOp::kMax:
      return run<kernels::Lanes<T>, kernels::Max>(fold, set);
    case ReduceOp::kProduct:
      return run<Unsigned, kernels::Product>(fold, set);
    case ReduceOp::kBand:
      return run_bits<kernels::And>(fold, sizeof(T), set);
    case ReduceOp::kBor:
      return run_bits<kernels::Or>(fold, sizeof(T), set);
    case ReduceOp::kBxor:
      return run_bits<kernels::Xor>(fold, sizeof(T), set);
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return run<Unsigned, kernels::Sum>(fold, set);
  }
}

void run_bool(const Fold& fold, ReduceOp op, InstructionSet set) {
  switch (op) {
    case ReduceOp::kMin:
    case ReduceOp::kProduct:
    case ReduceOp::kBand:
      return run<kernels::BoolLanes, kernels::And>(fold, set);
    case ReduceOp::kBxor:
      return run<kernels::BoolLanes, kernels::Xor>(fold, set);
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return run<kernels::BoolLanes, kernels::Or>(fold, set);
  }
}

template <typename Lanes>
void run_floating(const Fold& fold, ReduceOp op, InstructionSet set) {
  switch (op) {
    case ReduceOp::kAvg:
      return run<Lanes, kernels::Sum, kernels::DivideByNumInputs>(fold, set);
    case ReduceOp::kMin:
      return run<Lanes, kernels::Min>(fold, set);
    case ReduceOp::kMax:
      return run<Lanes, kernels::Max>(fold, set);
    case ReduceOp::kProduct:
      return run<Lanes, kernels::Product>(fold, set);
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum:
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return run<Lanes, kernels::Sum>(fold, set);
  }
}

// Reduces with the kernel of the dtype. REQUIRES: is_supported(kind.dtype, kind.op).
void run_any(const Fold& fold, ReduceKind kind, InstructionSet set) {
  switch (kind.dtype) {
    case DType::kUint8:
      return run_integer<uint8_t>(fold, kind.op, set);
    case DType::kInt8:
      return run_integer<int8_t>(fold, kind.op, set);
    case DType::kInt16:
      return run_integer<int16_t>(fold, kind.op, set);
    case DType::kInt32:
      return run_integer<int32_t>(fold, kind.op, set);
    case DType::kInt64:
      return run_integer<int64_t>(fold, kind.op, set);
    case DType::kBool:
      return run_bool(fold, kind.op, set);
    case DType::kFloat16:
      return run_floating<kernels::Float16Lanes>(fold, kind.op, set);
    case DType::kBfloat16:
      return run_floating<kernels::Bfloat16Lanes>(fold, kind.op, set);
    case DType::kFloat32:
      return run_floating<kernels::Lanes<float>>(fold, kind.op, set);
    case DType::kFloat64:
      return run_floating<kernels::Lanes<double>>(fold, kind.op, set);
  }
}

// Reduces block by block into memory that stays in the first-level cache, and copies each block to
// the output with streaming stores. So the kernels need no streaming form.
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

void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, ReduceKind kind,
            const ReduceSettings& options) {
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
