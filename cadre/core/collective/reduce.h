// Fused reduction of P inputs into one output: the arithmetic of every engine.
//
// Threads: any. Blocking: never. Lifetime: buffers are borrowed until the call returns.
// Errors: none; REQUIRES what is said at each function.
// Numerics: out[i] = (...((in[0][i] op in[1][i]) op in[2][i])...): a fold in the order of the
// inputs, for every element alike, so the bits depend neither on an element's offset nor on how a
// buffer is cut into calls, nor on the CPU's vector width.
// What each pair of dtype and operation means, NaN and overflow included, stands in
// reduction_table.h. Beyond it:
//   NaN   a float16 or bfloat16 result that is NaN is the quiet one, 0x7e00 or 0x7fc0. Which NaN
//         comes out of a float32 or float64 sum or product of several is the hardware's choice.
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

struct ReduceOptions {
  StorePolicy stores = StorePolicy::kCached;
  InstructionSet instruction_set = best_instruction_set();
};

// REQUIRES: is_supported(kind.dtype, kind.op), and premul_sum comes as sum of products; at least
// one input; `out` is disjoint from each input or identical to it. Buffers need no alignment. One
// input is copied as it is.
void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, ReduceKind kind,
            const ReduceOptions& options = {});

}  // namespace cadre
