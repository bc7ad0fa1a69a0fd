// Connects a process to its job: the process receives the layout of the job and opens control
// connections to the ranks of its host and to its neighbours in a tree of hosts.
//
// Threads: one. Blocking: connect_fabric(), until its deadline, and up to 2 s longer after a
// timeout, to determine the cause of the timeout.
// Lifetime: the result owns its sockets and listeners. Errors: kTimeout names the ranks that did
// not come; kInvalidArgument names both versions if two ranks run different versions of Cadre;
// kPeerLost names a rank that has ended or cannot be reached, both ends, the interface and the
// errno.
//
// The addresses of all ranks go to rank 0 through the store. Rank 0 gives each rank a ticket, which
// names its sponsor (sponsors.h): the rank that sends it the layout. The cost: a rank on a host of
// R ranks has R - 1 sockets. With H hosts, the lowest rank of a host has at most log2(H) + 1 more,
// and rank 0 has log2(H) more. Each rank makes 6 requests to the store (bootstrap_exchange.h). The
// layout has about 100 bytes for each rank and is sent to each process once. The settings of rank
// 0, such as its tuning file, are sent with the layout and need no request to the store.
//
// No rank returns before every rank has all its connections. Rank 0 announces this to all ranks
// along the tree. An error that ends one rank's attempt is reported to all ranks (watch.h). The
// keys in the store contain the round, the group and the number of the attempt; each rank erases
// its own keys. A rank whose attempt fails increments the number of the attempt in the store, so
// the next attempt finds no keys of a failed one.
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
  std::string id;           // the name of the group in keys and handshakes, for example "world"
  std::string listen_host;  // empty: the addresses that the membership has for this rank
  std::string version;      // the version of this library
  DeviceType device = DeviceType::kCpu;  // see RankAddress::device
  bool may_share_memory = true;
  // Returns the size of the segment for a host with this number of ranks. Only the lowest rank of
  // the host calls it.
  std::function<size_t(int num_ranks)> host_segment_bytes;
  // Returns the settings that rank 0 gives to all ranks, at most wire::kMaxSettingsBytes. Only rank
  // 0 calls it, when it knows the addresses of all ranks; its error ends the attempt on all ranks,
  // none of which comes too late to be told. If it is empty, the settings are empty.
  std::function<Result<std::string>()> settings = {};
};

struct FabricConnections {
  std::shared_ptr<const Layout> layout;  // shared with the control plane and the groups
  std::string settings;                  // the settings of rank 0
  LinkIdentity identity;                 // the identity that this rank shows in later handshakes
  // control[r] is the connection to rank r after the handshake. There are connections to the ranks
  // of this host, to the sponsor of this rank and to the ranks that it sponsors; the others are
  // null.
  std::vector<std::unique_ptr<os::Socket>> control;
  std::vector<std::unique_ptr<os::Listener>> tcp_listeners;
  std::unique_ptr<os::Listener> unix_listener;
  // A shared-memory segment that all ranks of this host have mapped. It is zero except for its
  // first page (host_segment.h). Null if the ranks cannot share memory.
  std::shared_ptr<os::SharedMemory> host_memory;
  std::string obstacle;  // the reason why host_memory is null
  // True if this host has more ranks than cores on which these ranks may run.
  bool is_crowded = false;
};

// Connects this rank to the other ranks of the membership, which all make this call. REQUIRES:
// membership.world_size > 1.
Result<FabricConnections> connect_fabric(os::System& system, const Membership& membership,
                                         const FabricOptions& options, Deadline deadline);

}  // namespace cadre
