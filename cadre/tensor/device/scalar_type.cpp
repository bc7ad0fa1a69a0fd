#include "cadre/tensor/device/scalar_type.h"

#include "cadre/core/base/error.h"

namespace cadre {

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
