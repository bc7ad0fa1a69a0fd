// Says whether the engine of a group may still use the memory of a call that has failed.
//
// Threads: any. Blocking: never. Errors: throws in a forked child, like every call of a
// Communicator.
#pragma once

#include "cadre/core/base/export.h"
#include "cadre/core/comm/communicator.h"

namespace cadre {

// Returns true for a group whose engine cannot cancel an operation that it has begun
// (Capabilities::is_abortable is false). A blocking call of such a group passes an owner of its
// memory as CollectiveOptions::keep_alive, because the call may throw while the engine still reads
// and writes that memory.
CADRE_EXPORT bool may_use_memory_after_failure(const Communicator& group);

}  // namespace cadre
