// Maps libtorch's element types to those that a group moves, and back.
//
// Threads: pure functions. Blocking: never. Errors: nullopt for a type that no group moves.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

CADRE_EXPORT std::optional<DType> to_dtype(at::ScalarType type);
// Returns "uint8, int32, ... and float16", for messages.
std::string dtype_names();
// Returns a name such as "float32". A type that groups do not move has PyTorch's name, such as
// "complex64".
std::string dtype_name(at::ScalarType type);
CADRE_EXPORT at::ScalarType to_scalar_type(DType dtype);

}  // namespace cadre
