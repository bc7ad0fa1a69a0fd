// Converts a DType of the code below the torch line to libtorch's.
//
// Threads: pure functions.
#pragma once

#include <c10/core/ScalarType.h>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

CADRE_EXPORT at::ScalarType to_scalar_type(DType dtype);

}  // namespace cadre
