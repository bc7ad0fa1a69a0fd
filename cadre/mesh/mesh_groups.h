// The groups of a mesh: each is made at its first use, by its members alone, and once.
//
// Threads: all methods from any thread; a thread that asks for a group which another one is making
// waits for it. Blocking: group() until all members have come, or for kDefaultConnectTimeout;
// close(). Lifetime: groups live as long as this; it keeps the world. Errors: as
// ProcessGroup::new_group_over_store. A group that could not be made is not tried again: every
// later call throws the same error.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/group/process_group.h"

namespace cadre {

class MeshGroups {
 public:
  // `id`: equal on all ranks of the world, and of this object alone.
  MeshGroups(ProcessGroup world, std::string id);

  const ProcessGroup& world() const { return world_; }
  // The group of these ranks of the world, of which this rank is one, in this order. `name` is for
  // messages; the first one counts. The reference stays valid.
  const ProcessGroup& group(const std::vector<int>& ranks, const std::string& name);
  // Of the groups that have been made.
  void close();

 private:
  // Empty while the group is being made.
  struct Slot {
    std::optional<ProcessGroup> group;
    std::optional<Error> failure;
  };

  // Makes the group of an empty slot.
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
