#include <memory>
#include <utility>
#include <vector>

#include "cadre/core/comm/group_destruction.h"
#include "cadre/core/comm/groups/rejoin_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// The child keeps the parent's handle, which owns what the child borrows.
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

std::optional<ProcessGroup> ProcessGroup::split(const SplitOptions& options,
                                                Duration timeout) const {
  const GroupCall call(communicator_, "split", timeout);
  return child(cadre::split(call.group, options, *call.deadline));
}

std::optional<ProcessGroup> ProcessGroup::new_group(const std::vector<int>& ranks,
                                                    Duration timeout) const {
  const GroupCall call(communicator_, "new_group", timeout);
  const std::vector<Rank> members(ranks.begin(), ranks.end());
  return child(cadre::new_group(call.group, members, *call.deadline));
}

ProcessGroup ProcessGroup::new_group_over_store(const std::vector<int>& ranks,
                                                const StoreGroupOptions& options,
                                                Duration timeout) const {
  const GroupCall call(communicator_, "new_group_over_store", timeout);
  const std::vector<Rank> members(ranks.begin(), ranks.end());
  return *child(cadre::new_group_over_store(call.group, members, options, *call.deadline));
}

ProcessGroup ProcessGroup::rejoin(const RejoinOptions& options) const {
  Communicator& group = group_behind(communicator_, "rejoin");
  // Both are checked before this group is given up.
  static_cast<void>(deadline_of(group, "rejoin", options.timeout));
  static_cast<void>(deadline_of(group, "rejoin", options.connect_timeout));
  return *child(
      rejoin_group(group, {.agreement = options.timeout, .connection = options.connect_timeout}));
}

}  // namespace cadre
