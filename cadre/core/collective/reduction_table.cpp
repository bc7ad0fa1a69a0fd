#include "cadre/core/collective/reduction_table.h"

#include <array>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// The rules of one class of dtypes, in the order of ReduceOp.
using Rules = std::array<ReductionRule, kNumReduceOps>;

constexpr std::string_view kNoBitsOfFloats =
    "bitwise operations are not defined for floating-point numbers; use an integer dtype or bool";

constexpr Rules kIntegerRules = {{
    {true, "the sum; overflow wraps (two's complement)"},
    {false, "the mean of integers is no integer; use sum and divide, or a floating-point dtype"},
    {true, "the least"},
    {true, "the greatest"},
    {true, "the product; overflow wraps (two's complement)"},
    {true, "bitwise and"},
    {true, "bitwise or"},
    {true, "bitwise exclusive or"},
    {false, "a factor is a real number; use a floating-point dtype"},
}};

constexpr Rules kBoolRules = {{
    {true, "logical or, as max; results are 0 or 1"},
    {false, "the mean of truth values is not a truth value; use max or min, or convert to float32"},
    {true, "logical and"},
    {true, "logical or"},
    {true, "logical and"},
    {true, "logical and"},
    {true, "logical or"},
    {true, "logical exclusive or"},
    {false, "a factor is a real number; use a floating-point dtype"},
}};

constexpr std::string_view kLeast =
    "the least; a NaN in any input gives NaN; between -0 and +0 the later input counts";
constexpr std::string_view kGreatest =
    "the greatest; a NaN in any input gives NaN; between -0 and +0 the later input counts";

constexpr Rules kHalfRules = {{
    {true, "the sum in float32, rounded once to nearest even; what is too large becomes infinite"},
    {true, "the sum in float32, divided by the number of ranks, rounded once to nearest even"},
    {true, kLeast},
    {true, kGreatest},
    {true, "the product in float32, rounded once to nearest even"},
    {false, kNoBitsOfFloats},
    {false, kNoBitsOfFloats},
    {false, kNoBitsOfFloats},
    {true, "each input times its rank's factor in float32, rounded to the dtype; then as sum"},
}};

constexpr Rules kFloatRules = {{
    {true, "the sum, rounded at each addition"},
    {true, "the sum, divided by the number of ranks"},
    {true, kLeast},
    {true, kGreatest},
    {true, "the product, rounded at each multiplication"},
    {false, kNoBitsOfFloats},
    {false, kNoBitsOfFloats},
    {false, kNoBitsOfFloats},
    {true, "each input times its rank's factor, both of the dtype, rounded; then as sum"},
}};

constexpr const Rules* rules_of(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
      return &kIntegerRules;
    case DType::kBool:
      return &kBoolRules;
    case DType::kFloat16:
    case DType::kBfloat16:
      return &kHalfRules;
    case DType::kFloat32:
    case DType::kFloat64:
      return &kFloatRules;
  }
  return nullptr;
}

using Sets = std::array<EnumSet<ReduceOp>, kNumDTypes>;

constexpr Sets supported_sets() {
  Sets sets;
  for (size_t dtype = 0; dtype < sets.size(); ++dtype) {
    const Rules& rules = *rules_of(static_cast<DType>(dtype));
    for (size_t op = 0; op < rules.size(); ++op) {
      if (rules[op].is_supported) sets[dtype].insert(static_cast<ReduceOp>(op));
    }
  }
  return sets;
}

// The supported operations of each dtype. They are computed at compile time, because every call of
// a reduction looks up its operation.
constexpr Sets kSupported = supported_sets();

}  // namespace

ReductionRule reduction_rule(DType dtype, ReduceOp op) {
  const Rules* rules = rules_of(dtype);
  const auto index = static_cast<size_t>(op);
  if (rules == nullptr || index >= rules->size()) {
    return {false,
            "the dtype or the operation does not exist; use a value that base/types.h names"};
  }
  return (*rules)[index];
}

namespace {

// A separate function, so that check_reduction(), which every reduction calls, needs no stack
// frame.
[[gnu::noinline]] Status refusal_of(DType dtype, ReduceOp op) {
  return Error(ErrorCode::kInvalidArgument,
               format("{} of {} is refused: {}", op, dtype, reduction_rule(dtype, op).meaning));
}

}  // namespace

EnumSet<ReduceOp> supported_reductions(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < kSupported.size() ? kSupported[index] : EnumSet<ReduceOp>();
}

bool is_supported(DType dtype, ReduceOp op) {
  return supported_reductions(dtype).contains(op);
}

Status check_reduction(DType dtype, ReduceOp op) {
  if (is_supported(dtype, op)) [[likely]]
    return {};
  return refusal_of(dtype, op);
}

}  // namespace cadre
