#include "cadre/core/rendezvous/presence.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/lost_rank.h"

namespace cadre {

std::string lost_key(uint64_t round, std::string_view group) {
  return format("cadre/{}/{}/lost", round, group);
}

Status leave_presence_will(os::System& system, Membership& membership, Deadline deadline) {
  const os::HostInfo host = system.host();
  auto will = membership.store->leave_will(lost_key(membership.round, membership.group),
                                           write_lost_rank({membership.rank, host.pid, host.name}),
                                           deadline);
  if (!will.ok()) return will.error();
  membership.will_group = membership.group;
  membership.will = std::move(will).value();
  return {};
}

}  // namespace cadre
