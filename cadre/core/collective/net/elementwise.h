// Operations of the net engine on elements besides additions: divide, widen, narrow.
//
// Threads: any. Blocking: never. Lifetime: buffers are borrowed until the call returns; they are
// disjoint. Numerics: those of collective/reduce.h, whose kernels these functions use.
#pragma once

#include <cstddef>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/reduce.h"

namespace cadre {

// Returns whether a reduction runs in float32 and is rounded once: those of float16 and bfloat16.
// Minimum and maximum do not, because they do not round.
constexpr bool needs_widening(ReduceKind kind) {
  const bool is_half = kind.dtype == DType::kBfloat16 || kind.dtype == DType::kFloat16;
  return is_half && kind.op != ReduceOp::kMin && kind.op != ReduceOp::kMax;
}

// Divides every element by `divisor`. REQUIRES: dtype is float32 or float64.
void divide(std::byte* data, size_t count, DType dtype, int divisor);
// Converts elements of `dtype`, float16 or bfloat16, to float32, exactly.
void widen(float* out, const std::byte* in, size_t count, DType dtype);
// Converts float32 to `dtype`, float16 or bfloat16, rounded to nearest even; a NaN becomes 0x7e00
// or 0x7fc0.
void narrow(std::byte* out, const float* in, size_t count, DType dtype);

}  // namespace cadre
