// The connections of a new group: cards through the store, proofs of the job's token, and one
// socket per pair and purpose.
//
// Threads: one. Blocking: connect_mesh, until its deadline. Lifetime: the Mesh owns its sockets.
// Errors: kTimeout names the ranks that did not come; kInvalidArgument names both versions when
// they differ; kPeerLost for a rank that is gone or cannot be reached, with both ends, the
// interface and the errno. What ends one rank's attempt is told to all (watch.h). Of each pair the
// higher rank connects to the lower one. The keys in the store carry the round, the group and the
// number of the attempt; they are erased at the end, when every rank must have read them. A rank
// whose attempt fails begins the next one for all, so connecting again finds nothing stale.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/comm/bootstrap/host_group.h"
#include "cadre/comm/communicator.h"
#include "cadre/os/system.h"
#include "cadre/rendezvous/rendezvous.h"
#include "cadre/wire/control.h"

namespace cadre {

struct MeshOptions {
  std::string id;           // of the group, in keys and proofs
  std::string listen_host;  // empty: where the membership says
  std::string version;      // of this library
  TransportChoice transport = TransportChoice::kAuto;
};

struct Mesh {
  std::vector<wire::RankCard> cards;  // by rank
  HostGroup host;
  // All ranks share memory and were allowed to: no sockets for data then.
  bool uses_shared_memory = false;
  // The ranks of this host outnumber the cores that they may run on, all of them together.
  bool is_crowded = false;
  // By rank; null for this one. The latter two are empty where memory is shared.
  std::vector<std::unique_ptr<os::Socket>> control;
  std::vector<std::unique_ptr<os::Socket>> collective;
  std::vector<std::unique_ptr<os::Socket>> point_to_point;
};

// Collective over the membership. REQUIRES: membership.world_size > 1.
Result<Mesh> connect_mesh(os::System& system, const Membership& membership,
                          const MeshOptions& options, Deadline deadline);

}  // namespace cadre
