// A group of which only rank 0 exists. Its engine computes the data of the other ranks, so code
// above the Communicator is tested on one thread as if there were peers.
//
// Threads, lifetime and errors: those of Communicator. Blocking: that of the engine. Only
// collectives work: there is no rank with which to exchange messages. For tests only.
#pragma once

#include <memory>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"

namespace cadre::testing {

// REQUIRES: options.backend is an engine that needs no other rank, such as fake_backend() over a
// FormulaPeers.
std::unique_ptr<Communicator> make_lone_group(os::System& system, int world_size,
                                              const CommunicatorOptions& options);

// Returns this process's System, which is never destroyed. An engine that cannot be aborted (see
// Backend) uses its group's System until the process ends, also after the group has left the
// engine.
os::System& process_system();

}  // namespace cadre::testing
