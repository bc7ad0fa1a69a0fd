// Opens the connections that a process has from the start: it learns the layout of the job and gets
// control connections to the ranks of its host and to its neighbours in a tree of hosts.
//
// Threads: one; later dial() of dial.h from any. Blocking: connect_fabric(), until its deadline,
// and up to 2 s beyond it to find out why it passed.
// Lifetime: the result owns its sockets and listeners. Errors: kTimeout names the ranks that did
// not come; kInvalidArgument names both versions if they differ; kPeerLost for a rank that is gone
// or cannot be reached, with both ends, the interface and the errno.
//
// The addresses of all ranks go to rank 0 through the store. Rank 0 gives each rank a ticket, which
// names its sponsor (sponsors.h): the rank that hands it the layout. A rank on a host of R ranks
// has R - 1 sockets. The lowest rank of one of H hosts has at most log2(H) + 1 more, rank 0
// log2(H). Each rank makes 6 requests to the store (bootstrap_exchange.h). The layout has about 100
// bytes for each rank and reaches each process once.
//
// No rank returns before every rank has all its connections, which rank 0 then announces along the
// tree. An error that ends one rank's attempt is reported to all ranks (watch.h). The keys in the
// store have the round, the group and the number of the attempt; each rank erases its own. A rank
// whose attempt fails raises the number for all ranks, so the next attempt finds no old keys.
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
  std::string id;           // the name of the group in keys and proofs, for example "world"
  std::string listen_host;  // if empty, this rank listens at the addresses of the membership
  std::string version;      // the version of this library
  bool may_share_memory = true;
  // Returns the segment size for a host with so many ranks. Only the host's lowest rank calls it.
  std::function<size_t(int num_ranks)> host_segment_bytes;
};

struct FabricConnections {
  std::shared_ptr<const Layout> layout;  // the control plane and the groups use it, too
  LinkIdentity identity;                 // the identity that this rank shows in later handshakes
  // control[r] is the connection to rank r after the handshake. There are connections to the ranks
  // of this host, the sponsor and the sponsored ranks.
  std::vector<std::unique_ptr<os::Socket>> control;
  std::vector<std::unique_ptr<os::Listener>> tcp_listeners;
  std::unique_ptr<os::Listener> unix_listener;
  // A segment that all ranks of this host have mapped. It is zero except for its first page
  // (host_segment.h). Null if they cannot share one.
  std::shared_ptr<os::SharedMemory> host_memory;
  std::string obstacle;  // says why host_memory is null
  // The ranks of this host outnumber the cores that they may run on together.
  bool is_crowded = false;
};

// Collective over the membership. REQUIRES: membership.world_size > 1.
Result<FabricConnections> connect_fabric(os::System& system, const Membership& membership,
                                         const FabricOptions& options, Deadline deadline);

}  // namespace cadre
