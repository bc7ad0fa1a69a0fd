#include "cadre/tensor/group/operands/dtype.h"

namespace cadre {

std::optional<DType> to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return DType::kUint8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kBool:
      return DType::kBool;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBfloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      return std::nullopt;
  }
}

std::string dtype_names() {
  std::string names;
  for (int i = 0; i < kNumDTypes; ++i) {
    if (i > 0) names += i + 1 == kNumDTypes ? " and " : ", ";
    names += to_string(static_cast<DType>(i));
  }
  return names;
}

std::string dtype_name(at::ScalarType type) {
  if (type == at::ScalarType::Undefined) return "undefined";
  return std::string(c10::getDtypeNames(type).first);
}

}  // namespace cadre
