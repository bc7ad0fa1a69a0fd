// A group of several ranks of which only this one exists. Its engine computes collectives without
// the other ranks, so code that uses the Communicator can run in one process as if there were
// peers.
//
// Threads, lifetime and errors: those of Communicator. Blocking: that of the engine. Messages,
// split() and rejoin() need other ranks, so they throw kInvalidArgument. new_group() and
// new_group_over_store() make groups whose other members do not exist either. All ranks count as
// ranks of this host.
#pragma once

#include <memory>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"

namespace cadre {

// Makes the group of `world_size` ranks, of which this process is `rank`. REQUIRES: options.backend
// makes an engine that needs no other rank. Throws kInvalidArgument if the rank is not one of 0 to
// world_size - 1.
CADRE_EXPORT std::unique_ptr<Communicator> make_lone_group(os::System& system, int world_size,
                                                           const CommunicatorOptions& options,
                                                           Rank rank = 0);

}  // namespace cadre
