// Creates groups that consist of some of a group's ranks.
//
// Threads: as for an operation of the parent; all its ranks make the calls in the same order.
// Blocking: until the deadline. A new group costs one all_gather of the parent; it has no thread
// and no connection of its own. Lifetime: a new group shares its parent's fabric; it is independent
// of the parent otherwise, which may be closed first. Errors: cadre::Error; kUnavailable when the
// host's memory is short. After a failure a subgroup is not rebuilt automatically: rejoin() the
// world and split again, or rejoin() the subgroup's membership, which does not affect the other
// groups. Ranks of the new group are 0 .. size - 1; its id is the parent's, a slash, the number of
// the parent's operation and the colour. Its name is derived from the parent's name in the same
// way, unless SplitOptions::name is set. Source: MPI_Comm_split, MPI_Comm_create_group; c10d's
// new_group. Guide: docs/guide/reference/groups-and-messages.md.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"

namespace cadre {

struct SplitOptions {
  // Ranks of one colour form a group. A rank without a colour, or with a negative one, is in no
  // group. MPI_UNDEFINED and NCCL_SPLIT_NOCOLOR are negative.
  std::optional<int> color = {};
  // Orders the new group's ranks; equal keys are ordered by the rank in the parent.
  int key = 0;
  // The name that is shown in messages. Ranks of one colour must pass the same name, which is
  // checked; groups may share a name. If empty, the name is derived from the parent's.
  std::string name = {};
};

// Makes one group of the ranks of each colour. Returns null on a rank without a colour. If ranks of
// one colour pass different names, all ranks of the parent throw the same kInvalidArgument, and the
// parent stays usable.
CADRE_EXPORT std::unique_ptr<Communicator> split(Communicator& parent, const SplitOptions& options,
                                                 Deadline deadline);

// Makes a group of these ranks of the parent, in this order. Every rank of the parent calls it with
// the same list and name, member or not, which is checked. Returns null on a rank that is not in
// the list. The name is shown in messages; if it is empty, it is derived from the parent's.
CADRE_EXPORT std::unique_ptr<Communicator> new_group(Communicator& parent,
                                                     std::span<const Rank> ranks, Deadline deadline,
                                                     const std::string& name = {});

struct StoreGroupOptions {
  // A store that only the members use, or one with a prefix for their keys (PrefixStore). May be
  // null for a group of one.
  std::shared_ptr<Store> store;
  // The members pass the same id, which is unique in the job; a retry needs a new one.
  std::string id;
  std::string name = {};  // shown in messages; if empty, the id is shown
};

// Makes a group that only its members create: they exchange over the store what new_group()
// exchanges over the parent. `any` is a group that contains all members; it runs no operation.
// Throws the failure of `any` if that group has failed or fails meanwhile. At the deadline throws
// an error that names the members that have not made the call. Source: c10d's new_group with
// use_local_synchronization.
CADRE_EXPORT std::unique_ptr<Communicator> new_group_over_store(const Communicator& any,
                                                                std::span<const Rank> ranks,
                                                                const StoreGroupOptions& options,
                                                                Deadline deadline);

}  // namespace cadre
