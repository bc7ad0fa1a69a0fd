#include "cadre/group/dtype.h"

#include "cadre/base/error.h"

namespace cadre {

std::optional<DType> to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return DType::kUint8;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
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

at::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return at::kByte;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
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
