// The groups of neighbouring ranks onto which Reshard::kOntoGroup puts the parameters of a unit.
//
// Threads: one. Blocking: group_of() is collective, until the group's deadline. Lifetime: shares
// the group of the ranks that own shards. Errors: kInvalidArgument.
// Source: FSDP2's reshard_after_forward with a number.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cadre/parallel/fsdp/options.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::parallel {

// Says for one unit how long it is full, and among how many ranks its parameters stay between its
// forward and its backward.
struct ReshardChoice {
  Reshard reshard = Reshard::kAfterForward;
  int group_size = 0;  // only kOntoGroup uses it
};

// Checks the options. what: names them in messages. A group of one rank becomes kAfterBackward, a
// group of all ranks kAfterForward.
ReshardChoice checked_choice(const std::string& what, Reshard reshard,
                             std::optional<int> group_size, const wrap::LocatedGroup& shard);

class ReshardGroups {
 public:
  explicit ReshardGroups(wrap::LocatedGroup shard) : shard_(std::move(shard)) {}

  // Returns the group of this rank for the choice; nullopt if the choice needs none. Makes one
  // group for each size.
  std::optional<wrap::LocatedGroup> group_of(const ReshardChoice& choice);

 private:
  wrap::LocatedGroup shard_;
  std::map<int, wrap::LocatedGroup> groups_;  // the groups; the key is their size
};

}  // namespace cadre::parallel
