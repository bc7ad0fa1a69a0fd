// Multiplies every element by one number. PREMUL_SUM is scale() followed by a SUM.
//
// Threads: any. Blocking: never. Lifetime: buffers are borrowed until the call returns.
// Errors: none; the function says what it REQUIRES. Numerics: reduction_table.h.
#pragma once

#include <cstddef>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/instruction_set.h"

namespace cadre {

// Computes out[i] = in[i] * factor. float64 is computed in float64, the others in float32, to which
// the factor is rounded first; a NaN of float16 or bfloat16 becomes 0x7e00 or 0x7fc0. REQUIRES:
// is_supported(dtype, kPremulSum); `out` is disjoint from `in` or identical to it.
CADRE_EXPORT void scale(std::byte* out, const std::byte* in, size_t count, DType dtype,
                        double factor, InstructionSet set = best_instruction_set());

}  // namespace cadre
