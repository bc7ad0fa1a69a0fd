// What each reduction means for each dtype, or why it is refused: the one table that engines,
// kernels, checks, tests and docs/guide/reference/reductions.md go by.
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
  // The result of a supported pair; for a refused pair the reason and what to use instead.
  std::string_view meaning;
};

// Also for values of the enumerations that do not exist: they are refused.
CADRE_EXPORT ReductionRule reduction_rule(DType dtype, ReduceOp op);

// The operations of its rules that are supported; none for a dtype that does not exist.
CADRE_EXPORT EnumSet<ReduceOp> supported_reductions(DType dtype);
CADRE_EXPORT bool is_supported(DType dtype, ReduceOp op);

// kInvalidArgument for a refused pair: "avg of int32 is refused: " and the rule's meaning. The same
// sentence wherever it is refused.
CADRE_EXPORT Status check_reduction(DType dtype, ReduceOp op);

}  // namespace cadre
