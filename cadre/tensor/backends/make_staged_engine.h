// Makes the staged engine on a rank that has agreed with the others on it.
//
// Threads, blocking, lifetime: those of a BackendFactory. Errors: kUnavailable if there is no
// device or no pinned memory for it; kInvalidArgument for an engine of the host that does not
// block.
#pragma once

#include <cstddef>
#include <memory>

#include "cadre/core/base/error.h"
#include "cadre/core/collective/backend.h"
#include "cadre/core/comm/backend_factory.h"

namespace cadre {

Result<std::unique_ptr<Backend>> make_staged_engine(const BackendSetup& setup, size_t piece_bytes);

}  // namespace cadre
