#include <memory>
#include <utility>
#include <vector>

#include "cadre/comm/groups/split.h"
#include "cadre/group/process_group.h"

namespace cadre {

// The child keeps the parent's handle, which owns what the child borrows.
std::optional<ProcessGroup> ProcessGroup::child(std::unique_ptr<Communicator> communicator) const {
  if (!communicator) return std::nullopt;
  struct Family {
    std::shared_ptr<Communicator> parent;
    std::unique_ptr<Communicator> child;
  };
  const auto family = std::make_shared<Family>(Family{communicator_, std::move(communicator)});
  return ProcessGroup(std::shared_ptr<Communicator>(family, family->child.get()));
}

std::vector<int> ProcessGroup::global_ranks() const {
  std::vector<int> ranks;
  for (const Rank rank : communicator_->global_ranks()) ranks.push_back(rank.value);
  return ranks;
}

int ProcessGroup::global_rank(int group_rank) const {
  return communicator_->global_rank(group_rank).value;
}

std::optional<int> ProcessGroup::group_rank(int global_rank) const {
  const std::optional<Rank> rank = communicator_->group_rank(global_rank);
  return rank ? std::optional(rank->value) : std::nullopt;
}

std::optional<ProcessGroup> ProcessGroup::split(const SplitOptions& options) const {
  return child(cadre::split(*communicator_, options,
                            communicator_->system().deadline_in(kDefaultConnectTimeout)));
}

std::optional<ProcessGroup> ProcessGroup::new_group(const std::vector<int>& ranks) const {
  const std::vector<Rank> members(ranks.begin(), ranks.end());
  return child(cadre::new_group(*communicator_, members,
                                communicator_->system().deadline_in(kDefaultConnectTimeout)));
}

ProcessGroup ProcessGroup::new_group_over_store(const std::vector<int>& ranks,
                                                const StoreGroupOptions& options) const {
  const std::vector<Rank> members(ranks.begin(), ranks.end());
  return *child(
      cadre::new_group_over_store(*communicator_, members, options,
                                  communicator_->system().deadline_in(kDefaultConnectTimeout)));
}

}  // namespace cadre
