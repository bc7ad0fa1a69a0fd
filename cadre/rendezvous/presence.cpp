#include "cadre/rendezvous/presence.h"

#include <utility>

#include "cadre/base/format.h"
#include "cadre/rendezvous/lost_rank.h"

namespace cadre {

std::string lost_key(uint64_t round) {
  return format("cadre/{}/lost", round);
}

Status leave_presence_will(os::System& system, Membership& membership, Deadline deadline) {
  const os::HostInfo host = system.host();
  auto will = membership.store->leave_will(lost_key(membership.round),
                                           write_lost_rank({membership.rank, host.pid, host.name}),
                                           deadline);
  if (!will.ok()) return will.error();
  membership.will = std::move(will).value();
  return {};
}

}  // namespace cadre
