#include "cadre/tensor/group/operands/dtype.h"

#include "cadre/core/base/error.h"

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

at::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return at::kByte;
    case DType::kInt8:
      return at::kChar;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    case DType::kBool:
      return at::kBool;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBfloat16:
      return at::kBFloat16;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
  }
  throw Error(ErrorCode::kInternal, "to_scalar_type: not a DType");
}

}  // namespace cadre
