// Makes a new group of the surviving ranks of a group: rejoin() and connect() in one call, which is
// repeated if another rank dies between the two.
//
// Threads: one thread of each rank; no other thread uses the group meanwhile. Blocking: at most
// twice the sum of the times in RejoinTimes, and the time of close(). Lifetime: the new group is
// independent of the old one, which is closed and may be destroyed. Errors: cadre::Error; those of
// rejoin() and of Communicator::connect(). kPeerLost without a retry if the store has ended. The
// launcher hosts the store, or rank 0 if there is no launcher.
#pragma once

#include <memory>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/defaults.h"

namespace cadre {

struct RejoinTimes {
  // How long the ranks wait for ranks that are not known to be lost. The new group does not include
  // ranks that are later.
  Duration agreement = kDefaultConnectTimeout;
  Duration connection = kDefaultConnectTimeout;
};

// Returns the new group. All remaining ranks call it; they keep their order and the options of the
// group. Fails the old group on all ranks if it has not failed yet. If a connection fails because
// another rank was lost or is late, connects a group without that rank.
CADRE_EXPORT std::unique_ptr<Communicator> rejoin_group(Communicator& group,
                                                        const RejoinTimes& times = {});

}  // namespace cadre
