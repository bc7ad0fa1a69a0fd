// What every way to make a group of some of a group's ranks shares: the pieces that a rank cuts
// before it knows the others', and the group made of what all have brought.
//
// Threads: as Communicator::Impl. Blocking: never. Lifetime: a new group shares its parent's fabric
// and nothing else. Errors: cadre::Error, kUnavailable when the host's memory is short.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/comm/communicator.h"
#include "cadre/comm/communicator_impl.h"

namespace cadre {

struct GroupLabel {
  std::string name;
  std::string id;
};

// A group to be made of some of the parent's ranks.
struct NewGroup {
  GroupLabel label;
  std::vector<int> members;  // ranks of the parent, in the order of the new group
  std::optional<GroupPieces> pieces;
  std::vector<GroupPlaces> places;  // of the members, in their order
};

// Cuts, into `group`, what this rank needs of the host's memory in case the group lies on this
// host. Which of the parent's ranks will be members may not be known yet, so that all `candidates`
// of this host may hold it. Nothing is cut where no memory can be shared. An error is no reason to
// stay away from the exchange that makes the group, which the others are in.
Status cut_pieces(const Communicator::Impl& parent, const std::vector<int>& candidates,
                  NewGroup& group);

// Fails the group for all members if this rank cannot take part. REQUIRES: this rank is one of
// them.
std::unique_ptr<Communicator> make_group(const Communicator::Impl& parent, NewGroup group);

}  // namespace cadre
