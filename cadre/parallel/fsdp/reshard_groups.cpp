#include "cadre/parallel/fsdp/reshard_groups.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre::parallel {

ReshardChoice checked_choice(const std::string& what, Reshard reshard,
                             std::optional<int> group_size, const wrap::LocatedGroup& shard) {
  if (reshard != Reshard::kOntoGroup) return {.reshard = reshard};
  const int world_size = shard.world_size();
  const auto refuse = [&](const std::string& problem) {
    throw Error(ErrorCode::kInvalidArgument,
                format("FullyShardedDataParallel, {}: {}: Reshard::kOntoGroup {}: set "
                       "reshard_group_size to a divisor of {}, the number of ranks that own "
                       "shards; for example the number of ranks of a host",
                       shard.rank_text(), what, problem, world_size));
  };
  if (!group_size) refuse("needs the size of the group");
  if (*group_size < 1 || world_size % *group_size != 0) {
    refuse(format("onto groups of {} ranks, which does not divide {}", *group_size, world_size));
  }
  if (*group_size == 1) return {.reshard = Reshard::kAfterBackward};
  if (*group_size == world_size) return {.reshard = Reshard::kAfterForward};
  return {.reshard = reshard, .group_size = *group_size};
}

std::optional<wrap::LocatedGroup> ReshardGroups::group_of(const ReshardChoice& choice) {
  if (choice.reshard != Reshard::kOntoGroup) return std::nullopt;
  const auto known = groups_.find(choice.group_size);
  if (known != groups_.end()) return known->second;
  const ProcessGroup& whole = shard_.process_group();
  const ProcessGroup part = *whole.split({.color = shard_.rank() / choice.group_size});
  whole.communicator().fail_together(part.communicator());
  return groups_.emplace(choice.group_size, part).first->second;
}

}  // namespace cadre::parallel
