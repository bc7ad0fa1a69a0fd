// Converts between libtorch's dtypes and the DType of a group's operations.
//
// Threads: pure functions. Blocking: never. Errors: nullopt for a dtype that no operation supports.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/tensor/device/scalar_type.h"

namespace cadre {

CADRE_EXPORT std::optional<DType> to_dtype(at::ScalarType type);
// Returns the list of the supported dtypes, "uint8, int32, ... and float16", for messages.
std::string dtype_names();
// Returns a name such as "float32". For an unsupported dtype it is PyTorch's name, such as
// "complex64".
std::string dtype_name(at::ScalarType type);

}  // namespace cadre
