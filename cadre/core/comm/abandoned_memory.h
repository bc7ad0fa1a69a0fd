// Says whether the engine of a group may still use the memory of a call that has returned.
//
// Threads: any. Errors: throws in a forked child, like every call of a Communicator.
#pragma once

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"

namespace cadre {

// Returns true if a blocking call on memory of this type must pass an owner of it as
// CollectiveOptions::keep_alive: the engine only enqueues the operation (is_stream_ordered), or it
// cannot cancel an operation that it has begun (is_abortable is false), so that the call may throw
// while the engine still reads and writes the memory.
CADRE_EXPORT bool may_use_memory_after_return(const Communicator& group, DeviceType type);

}  // namespace cadre
