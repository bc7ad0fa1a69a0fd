// A group of which only rank 0 exists: its engine computes what the others would have brought, so
// that code above the Communicator is tested on one thread as if it had peers.
//
// Threads, lifetime and errors: as Communicator. Blocking: as the engine. Collectives only: there
// is nobody to exchange messages with. For tests only.
#pragma once

#include <memory>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"

namespace cadre::testing {

// REQUIRES: options.backend, an engine that needs no other rank, such as fake_backend() over a
// FormulaPeers.
std::unique_ptr<Communicator> make_lone_group(os::System& system, int world_size,
                                              const CommunicatorOptions& options);

// This process's System, never destroyed: an engine that cannot be aborted and that its group has
// left (see Backend) uses the group's System until the process ends.
os::System& process_system();

}  // namespace cadre::testing
