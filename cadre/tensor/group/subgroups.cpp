#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/checks.h"
#include "cadre/core/comm/group_destruction.h"
#include "cadre/core/comm/groups/rejoin_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// Returns the handle of a subgroup. It keeps the parent's handle alive, which owns objects that the
// subgroup borrows.
std::optional<ProcessGroup> ProcessGroup::child(std::unique_ptr<Communicator> communicator) const {
  if (!communicator) return std::nullopt;
  struct Family {
    std::shared_ptr<Communicator> parent;
    std::unique_ptr<Communicator> communicator;
  };
  return ProcessGroup(
      share_group(std::make_unique<Family>(Family{communicator_, std::move(communicator)})));
}

std::vector<int> ProcessGroup::global_ranks() const {
  std::vector<int> ranks;
  for (const Rank rank : group_behind(communicator_, "global_ranks").global_ranks()) {
    ranks.push_back(rank.value);
  }
  return ranks;
}

int ProcessGroup::global_rank(int group_rank) const {
  return group_behind(communicator_, "global_rank").global_rank(group_rank).value;
}

std::optional<int> ProcessGroup::group_rank(int global_rank) const {
  const std::optional<Rank> rank =
      group_behind(communicator_, "group_rank").group_rank(global_rank);
  return rank ? std::optional(rank->value) : std::nullopt;
}

std::optional<ProcessGroup> ProcessGroup::split(const SplitGroupOptions& options) const {
  const GroupCall call(communicator_, "split", options.timeout);
  return child(cadre::split(call.group,
                            {.color = options.color, .key = options.key, .name = options.name},
                            *call.deadline));
}

std::optional<ProcessGroup> ProcessGroup::new_group(const std::vector<int>& ranks,
                                                    const NewGroupOptions& options) const {
  const GroupCall call(communicator_, "new_group", options.timeout);
  const std::vector<Rank> members(ranks.begin(), ranks.end());
  return child(cadre::new_group(call.group, members, *call.deadline, options.name));
}

ProcessGroup ProcessGroup::new_group_over_store(const std::vector<int>& ranks,
                                                const NewGroupOverStoreOptions& options) const {
  const GroupCall call(communicator_, "new_group_over_store", options.timeout);
  const std::vector<Rank> members(ranks.begin(), ranks.end());
  return *child(cadre::new_group_over_store(
      call.group, members, {.store = options.store, .id = options.id, .name = options.name},
      *call.deadline));
}

int ProcessGroup::local_rank() const {
  const Communicator& group = group_behind(communicator_, "local_rank");
  const std::vector<int> hosts = group.hosts();
  const auto self = hosts.begin() + group.rank();
  return static_cast<int>(std::count(hosts.begin(), self, *self));
}

int ProcessGroup::local_world_size() const {
  const std::vector<int> hosts = group_behind(communicator_, "local_world_size").hosts();
  return static_cast<int>(std::ranges::count(hosts, hosts[static_cast<size_t>(rank())]));
}

int ProcessGroup::node_rank() const {
  return group_behind(communicator_, "node_rank").hosts()[static_cast<size_t>(rank())];
}

int ProcessGroup::num_nodes() const {
  return std::ranges::max(group_behind(communicator_, "num_nodes").hosts()) + 1;
}

std::string ProcessGroup::host() const {
  return group_behind(communicator_, "host").system().host().name;
}

ProcessGroup ProcessGroup::rejoin(const RejoinOptions& options) const {
  Communicator& group = group_behind(communicator_, "rejoin");
  // Throws for an invalid timeout before this group is closed.
  static_cast<void>(deadline_of(group, "rejoin", options.timeout));
  static_cast<void>(deadline_of(group, "rejoin", options.connect_timeout));
  return *child(
      rejoin_group(group, {.agreement = options.timeout, .connection = options.connect_timeout}));
}

}  // namespace cadre
