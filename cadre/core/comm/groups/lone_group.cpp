#include "cadre/core/comm/groups/lone_group.h"

#include <numeric>
#include <utility>
#include <vector>

#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/fabric/fabric.h"
#include "cadre/core/rendezvous/rendezvous.h"

namespace cadre {

std::unique_ptr<Communicator> make_lone_group(os::System& system, int world_size,
                                              const CommunicatorOptions& options, Rank rank) {
  const Status place = check_place(rank, world_size);
  if (!place.ok()) throw place.error();
  Membership membership;
  membership.rank = rank;
  membership.world_size = world_size;
  auto fabric = Fabric::stand_alone(system, membership, fabric_settings(membership, options));
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto identity = GroupIdentity::of_connection(id_of(options), fabric->connection_number());
  auto impl = std::make_unique<Communicator::Impl>(
      std::move(fabric), options, identity, GroupMembers{std::move(ranks), rank, membership});
  impl->open(std::nullopt, {}, system.deadline_in(options.timeout));
  return std::make_unique<Communicator>(std::move(impl));
}

}  // namespace cadre
