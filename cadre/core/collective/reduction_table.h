// The result of each reduction for each dtype, or why it is not supported. Engines, kernels,
// checks, tests and docs/guide/reference/reductions.md all use this table.
//
// Threads: pure functions. Blocking: never. Lifetime: texts are static. Errors: check_reduction.
// Source: c10d's operations; where its backends differ (bool, NaN, integers) the table decides.
#pragma once

#include <string_view>

#include "cadre/core/base/enum_set.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

struct ReductionRule {
  bool is_supported = false;
  // The result of a supported operation; for an unsupported one, the reason and what to use
  // instead.
  std::string_view meaning;
};

// Returns an unsupported rule for values that are not in the enumerations.
CADRE_EXPORT ReductionRule reduction_rule(DType dtype, ReduceOp op);

// Returns the operations that are supported for the dtype; an empty set for a dtype that does not
// exist.
CADRE_EXPORT EnumSet<ReduceOp> supported_reductions(DType dtype);
CADRE_EXPORT bool is_supported(DType dtype, ReduceOp op);

// Returns kInvalidArgument for an unsupported operation: "avg of int32 is refused: " and the rule's
// meaning. All callers report this text.
CADRE_EXPORT Status check_reduction(DType dtype, ReduceOp op);

}  // namespace cadre
