// The groups of a mesh: each is created once, at its first use, by its members only.
//
// Threads: all methods from any thread; a call for a group that another thread creates waits for
// it. Blocking: group() until all members have called it, or for kDefaultConnectTimeout; close().
// Lifetime: the groups live as long as this object, which keeps the world alive. Errors: as
// ProcessGroup::new_group_over_store. After a failure the creation is not retried: every later call
// throws the same error. The groups and the world fail together.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

class MeshGroups {
 public:
  // `id`: equal on all ranks of the world and different for each mesh.
  MeshGroups(ProcessGroup world, std::string id);

  const ProcessGroup& world() const { return world_; }
  // Returns the group of these ranks of the world, in this order; this rank is one of them. `name`
  // appears in messages; later calls for the same ranks do not change it. The reference stays valid
  // as long as this object.
  const ProcessGroup& group(const std::vector<int>& ranks, const std::string& name);
  // Closes all groups that were created.
  void close(Deadline deadline);

 private:
  // The result of creating a group: the group or the error. Both are nullopt while the group is
  // being created.
  struct Slot {
    std::optional<ProcessGroup> group;
    std::optional<Error> failure;
  };

  // Creates the group and stores it, or the error, in the slot.
  void fill(Slot& slot, const std::vector<int>& ranks, const std::string& name);
  // Waits until another thread has filled the slot.
  void await(const Slot& slot, const std::string& name);
  bool is_filled(const Slot& slot);
  ProcessGroup make(const std::vector<int>& ranks, const std::string& name) const;

  const ProcessGroup world_;
  const std::string id_;
  std::mutex mutex_;
  std::map<std::vector<int>, Slot> slots_;
  std::vector<os::Waiter*> waiters_;
};

}  // namespace cadre
