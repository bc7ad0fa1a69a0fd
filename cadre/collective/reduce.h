// Fused reduction of P inputs into one output: the arithmetic of every engine.
//
// Threads: any. Blocking: never. Lifetime: buffers are borrowed until the call returns.
// Errors: none; REQUIRES what is said at each function.
// Numerics: out[i] = (...((in[0][i] op in[1][i]) op in[2][i])...): a fold in the order of the
// inputs, for every element alike, so the bits depend neither on an element's offset nor on how a
// buffer is cut into calls, nor on the CPU's vector width.
//   bfloat16  sums and averages in float32 over all inputs, rounded once, to nearest even; a NaN
//             becomes the quiet NaN 0x7fc0, as in libtorch.
//   AVG       the sum divided by the number of inputs (bfloat16: before the rounding).
//   MIN, MAX  a NaN in any input gives NaN. Of two equal values, such as -0 and +0, the later
//             input's is taken.
//   integers  sums wrap.
// Which NaN comes out where several go in (sign, payload) is the hardware's choice.
#pragma once

#include <cstddef>
#include <span>

#include "cadre/base/types.h"
#include "cadre/collective/copy.h"

namespace cadre {

struct ReduceKind {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
};

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The widest one that this CPU has. Narrower ones give the same bits.
InstructionSet best_instruction_set();

struct ReduceOptions {
  StorePolicy stores = StorePolicy::kCached;
  InstructionSet instruction_set = best_instruction_set();
};

// REQUIRES: is_supported(kind.dtype, kind.op); at least one input; `out` is disjoint from each
// input or identical to it. Buffers need no alignment.
void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, ReduceKind kind,
            const ReduceOptions& options = {});

}  // namespace cadre
