#include "cadre/testing/core/lone_group.h"

#include <utility>
#include <vector>

#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/fabric/fabric.h"

namespace cadre::testing {

std::unique_ptr<Communicator> make_lone_group(os::System& system, int world_size,
                                              const CommunicatorOptions& options) {
  Membership membership;
  membership.rank = 0;
  membership.world_size = 1;
  auto fabric = Fabric::connect(system, membership, fabric_settings(membership, options),
                                system.deadline_in(options.timeout))
                    .value_or_throw();
  membership.world_size = world_size;
  // This process, which is the only one of the fabric, represents all ranks of the group.
  const std::vector<int> ranks(static_cast<size_t>(world_size), 0);
  const auto identity = GroupIdentity::of_connection(id_of(options), fabric->connection_number());
  auto impl = std::make_unique<Communicator::Impl>(std::move(fabric), options, identity,
                                                   GroupMembers{ranks, 0, membership});
  impl->open(std::nullopt, {});
  return std::make_unique<Communicator>(std::move(impl));
}

os::System& process_system() {
  static os::System& system = *os::make_native_system().release();
  return system;
}

}  // namespace cadre::testing
