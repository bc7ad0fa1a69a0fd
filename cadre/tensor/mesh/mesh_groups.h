// The groups of a mesh: each is created once, at its first use, by its members only.
//
// Threads: all methods from any thread; a call for a group that another thread creates waits for
// it. Blocking: group() until all members have called it, or for kDefaultConnectTimeout; close().
// Lifetime: groups live as long as this; it keeps the world. Errors: as
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
  // `id`: equal on all ranks of the world, unique to this object.
  MeshGroups(ProcessGroup world, std::string id);

  const ProcessGroup& world() const { return world_; }
  // Returns the group of these ranks of the world, in this order; this rank is one of them. `name`
  // is used in messages; the name of the first call is kept. The reference stays valid.
  const ProcessGroup& group(const std::vector<int>& ranks, const std::string& name);
  // Closes all groups that were created.
  void close(Deadline deadline);

 private:
  // Both members are nullopt while the group is being created.
  struct Slot {
    std::optional<ProcessGroup> group;
    std::optional<Error> failure;
  };

  // Creates the group of an empty slot.
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
