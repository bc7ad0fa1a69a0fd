// The steps that all ways to create a subgroup share: the allocation of a rank's pieces of memory
// before it knows the pieces of the others, and the creation of the group from the data that all
// ranks have exchanged.
//
// Threads: as for Communicator::Impl. Blocking: never. Lifetime: a new group shares its parent's
// fabric and nothing else. Errors: cadre::Error; kUnavailable if the host's memory is short.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/fabric/group_identity.h"

namespace cadre {

// The members and the identity of a group that is to be made of some of the parent's ranks.
struct NewGroup {
  std::string name;
  GroupIdentity identity;
  std::optional<GroupIdentity> creation = {};  // see GroupMembers::creation
  std::vector<int> members = {};  // the ranks of the parent, in the order of the new group
  std::optional<GroupPieces> pieces = {};
  std::vector<GroupPlaces> places = {};  // places of the members, in their order
};

// Allocates this rank's pieces of the host's memory into `group`, if memory can be shared. It may
// not be known yet which of the parent's ranks will be members, so the pieces are shared with all
// `candidates` on this host. Even after an error this rank must take part in the exchange that
// creates the group, because the other ranks do.
Status cut_pieces(const Communicator::Impl& parent, const std::vector<int>& candidates,
                  NewGroup& group);

// Makes the group, or fails it for all members if this rank cannot take part. REQUIRES: this rank
// is a member.
std::unique_ptr<Communicator> make_group(const Communicator::Impl& parent, NewGroup group,
                                         Deadline deadline);

// Returns text such as "[0, 2]".
std::string list_of(std::span<const Rank> ranks);
// Throws if the list of ranks is empty or has an invalid or repeated rank. Does not compare it with
// the lists of other ranks.
void check_list(std::string_view call, const Communicator& parent, std::span<const Rank> ranks);
std::vector<int> values_of(std::span<const Rank> ranks);
// Returns ranks of the parent as ranks of the fabric.
std::vector<int> fabric_ranks(const Communicator::Impl& parent, std::span<const Rank> ranks);
uint64_t digest_of_ranks(std::span<const int> ranks);

// The arguments of one rank in new_group(), as the ranks exchange them.
struct NewGroupCall {
  uint64_t digest = 0;  // the digest of the list of ranks
  uint64_t stamp = 0;   // a random number, which distinguishes two calls of one rank in a store
  uint64_t name_digest = 0;  // the digest of the name that the program gives the group
  int64_t is_short = 0;
  GroupPlaces places;
};

// Allocates this rank's pieces. Records in `call` where they are, or that there is not enough
// memory.
template <typename Call>
Status cut_into(const Communicator::Impl& parent, const std::vector<int>& candidates,
                NewGroup& group, Call& call) {
  Status status = cut_pieces(parent, candidates, group);
  call.is_short = status.ok() ? 0 : 1;
  if (group.pieces) call.places = group.pieces->places();
  return status;
}

// Returns an error that names `culprit`, a rank of the group.
Error error_of_rank(const Communicator::Impl& group, ErrorCode code, int culprit,
                    std::string message);

// Throws on all ranks of the parent if one of them is short of memory, which every rank sees in
// `calls`. The parent stays usable.
template <typename Call>
void check_memory(const Communicator::Impl& parent, const Status& own, std::span<const Call> calls,
                  std::span<const int> callers) {
  if (!own.ok()) throw own.error();
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].is_short == 0) continue;
    throw error_of_rank(
        parent, ErrorCode::kUnavailable, callers[i],
        format("the new group was not made: {} has too little shared memory for its part; see the "
               "error of that rank, free symmetric memory or groups there, and try again",
               parent.monitor->roster().describe(callers[i])));
  }
}

// Publishes a failure of the new group when this rank gives up creating it. Members that have
// already created the group, or create it later from the exchanged data, fail with it. `group` is
// the parent, or the group that contains all members.
void tell_giving_up(const Communicator::Impl& group, const GroupIdentity& identity,
                    const Error& error);

// Throws the failure of `group` if it has failed. The other ranks have that failure, too, so no
// rank waits for this one.
void check_failure(const Communicator::Impl& group);
// Throws if the group is closed or has failed. Called before memory is allocated: the other ranks
// do not learn of this error, so memory that was allocated for the call could not be reused.
void check_usable(const Communicator::Impl& group, std::string_view call);

}  // namespace cadre
