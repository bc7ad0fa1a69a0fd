// The survivors of a group that has lost ranks make a new one: rejoin() and connect() in one call,
// repeated where another rank dies between the two.
//
// Threads: one of each rank, and no other uses the group meanwhile. Blocking: for at most twice the
// sum of both times, and the time of close(). Lifetime: the new group is independent of the old
// one, which is closed and may be destroyed. Errors: cadre::Error; those of rejoin() and of
// Communicator::connect(). kPeerLost without a retry when the store is gone, which the launcher or,
// without one, rank 0 hosts.
#pragma once

#include <memory>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/defaults.h"

namespace cadre {

struct RejoinTimes {
  // For ranks that are not known to be lost; the group goes on without those that do not come.
  Duration agreement = kDefaultConnectTimeout;
  Duration connection = kDefaultConnectTimeout;
};

// Called by all ranks that are left, which keep their order and have the options of the group. It
// fails the group on all ranks if it has not failed yet. A connection that fails because another
// rank was lost or is late is given up for a group without that rank.
CADRE_EXPORT std::unique_ptr<Communicator> rejoin_group(Communicator& group,
                                                        const RejoinTimes& times = {});

}  // namespace cadre
