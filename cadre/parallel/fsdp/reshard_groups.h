// Makes the groups of neighbouring ranks among which Reshard::kOntoGroup divides a unit's
// parameters after the forward.
//
// Blocking: group_of() is a collective, until the group's deadline. Lifetime: shares the group of
// the ranks that own shards. Errors: kInvalidArgument. Source: FSDP2's reshard_after_forward with a
// number.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cadre/parallel/fsdp/options.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::parallel {

// The Reshard of one unit and, for kOntoGroup, the number of ranks among which its parameters are
// divided between forward and backward.
struct ReshardChoice {
  Reshard reshard = Reshard::kAfterForward;
  int group_size = 0;  // 0 unless reshard is kOntoGroup
};

// Checks these options of a unit and returns them. kOntoGroup with groups of one rank is the same
// as kAfterBackward, which is then returned; with one group of all ranks it is kAfterForward. what:
// the name of the options in errors. shard: the ranks that own shards.
ReshardChoice checked_choice(const std::string& what, Reshard reshard,
                             std::optional<int> group_size, const wrap::LocatedGroup& shard);

class ReshardGroups {
 public:
  explicit ReshardGroups(wrap::LocatedGroup shard) : shard_(std::move(shard)) {}

  // Returns this rank's group of choice.group_size ranks; nullopt if `choice` is not kOntoGroup.
  // Units with the same group size share one group.
  std::optional<wrap::LocatedGroup> group_of(const ReshardChoice& choice);

 private:
  wrap::LocatedGroup shard_;
  std::map<int, wrap::LocatedGroup> groups_;  // the key is the number of ranks
};

}  // namespace cadre::parallel
