// The connections that a process has from the start: it learns the layout of the job, and gets
// control connections to the ranks of its host and to its neighbours in a tree of hosts.
//
// Threads: one; dial() of dial.h afterwards from any. Blocking: connect_fabric, until its deadline,
// and up to 2 s beyond it to find out why that passed.
// Lifetime: the result owns its sockets and listeners. Errors: kTimeout names the ranks that did
// not come; kInvalidArgument names both versions when they differ; kPeerLost for a rank that is
// gone or cannot be reached, with both ends, the interface and the errno.
//
// All ranks' addresses go to rank 0 through the store, which gives each rank a ticket: the rank
// that hands it the layout, its sponsor (sponsors.h). Sockets of a rank on a host of R: R - 1, and
// log2(H) + 1 at most for the lowest rank of one of H hosts, log2(H) for rank 0. Requests to the
// store: 6 for each rank (bootstrap_exchange.h). The layout has about 100 bytes for each rank and
// reaches each process once.
//
// No rank returns before every rank has all its connections, which rank 0 then announces along the
// tree. What ends one rank's attempt is reported to all ranks (watch.h). The keys in the store
// carry the round, the group and the number of the attempt; each rank erases its own. A rank whose
// attempt fails begins the next one for all, so connecting again finds nothing stale.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/fabric/bootstrap/handshake.h"
#include "cadre/core/fabric/bootstrap/layout.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/rendezvous.h"

namespace cadre {

struct FabricOptions {
  std::string id;           // in keys and proofs: "world"
  std::string listen_host;  // empty: where the membership says
  std::string version;      // version of this library
  bool may_share_memory = true;
  // Segment size for a host with so many ranks; the host's lowest rank decides.
  std::function<size_t(int num_ranks)> host_segment_bytes;
};

struct FabricConnections {
  std::shared_ptr<const Layout> layout;  // shared with what serves the connections later on
  LinkIdentity identity;                 // for later handshakes
  // By rank: proved connections to the ranks of this host, the sponsor and those sponsored.
  std::vector<std::unique_ptr<os::Socket>> control;
  std::vector<std::unique_ptr<os::Listener>> tcp_listeners;
  std::unique_ptr<os::Listener> unix_listener;
  // A segment that all ranks of this host have mapped: zero but for its first page
  // (host_segment.h). Null where they cannot.
  std::shared_ptr<os::SharedMemory> host_memory;
  std::string obstacle;  // why not
  // The ranks of this host outnumber the cores that they may run on, all of them together.
  bool is_crowded = false;
};

// Collective over the membership. REQUIRES: membership.world_size > 1.
Result<FabricConnections> connect_fabric(os::System& system, const Membership& membership,
                                         const FabricOptions& options, Deadline deadline);

}  // namespace cadre
