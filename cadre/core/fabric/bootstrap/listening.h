// The listeners of a rank, on TCP and on a unix socket, and the RankAddress that tells the other
// ranks where to connect.
//
// Threads: one owner. Blocking: never. Lifetime: the listeners end with the object.
// Errors: kInvalidArgument if other hosts can reach the address but the job has no token; the
// errors of System::listen.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/wire/control.h"

namespace cadre {

struct ListeningOptions {
  std::string listen_host;  // if empty, this rank listens at the addresses of the membership
  std::string version;      // the version of this library, which messages to peers contain
  DeviceType device = DeviceType::kCpu;  // see RankAddress::device
};

struct Listening {
  std::vector<std::unique_ptr<os::Listener>> tcp;  // has one listener for each address of this host
  std::unique_ptr<os::Listener> unix;
  wire::RankAddress rank_address;

  std::vector<os::Listener*> all() const;
};

// Returns the part of a RankAddress that describes this process, without the addresses at which it
// listens. Its `probe` is a random number other than 0, so it differs from the zeros in new shared
// memory.
wire::RankAddress address_of_this_process(os::System& system);

Result<Listening> start_listening(os::System& system, const Membership& membership,
                                  const ListeningOptions& options);

}  // namespace cadre
