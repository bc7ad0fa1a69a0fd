// Fused reduction of P inputs into one output: the arithmetic of every engine.
//
// Threads: any. Blocking: never. Lifetime: buffers are borrowed until the call returns.
// Errors: none; the function says what it REQUIRES.
// Numerics: out[i] = (...((in[0][i] op in[1][i]) op in[2][i])...): a fold in the order of the
// inputs, in the same way for every element. So the bits depend neither on an element's offset, nor
// on how a buffer is cut into calls, nor on the CPU's vector width.
// reduction_table.h defines the result of each pair of dtype and operation, also for NaN and
// overflow. In addition:
//   NaN   a float16 or bfloat16 result that is NaN is the quiet one, 0x7e00 or 0x7fc0. If several
//         operands of a float32 or float64 sum or product are NaN, the hardware chooses one of
//         them.
//   flags a thread that flushes denormals (FTZ, DAZ) does so in float32, float64 and bfloat16;
//         float16 is the same either way.
#pragma once

#include <cstddef>
#include <span>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/copy.h"
#include "cadre/core/collective/instruction_set.h"

namespace cadre {

struct ReduceKind {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
};

struct ReduceSettings {
  StorePolicy stores = StorePolicy::kCached;
  InstructionSet instruction_set = best_instruction_set();
};

// Computes out[i] for `count` elements. REQUIRES: is_supported(kind.dtype, kind.op), and a
// premul_sum is passed as a sum of inputs that are already multiplied; at least one input; `out` is
// disjoint from each input or identical to it. Buffers need no alignment. A single input is copied.
void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, ReduceKind kind,
            const ReduceSettings& options = {});

}  // namespace cadre
