#include "cadre/tensor/mesh/mesh_groups.h"

#include <exception>
#include <utility>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/queue/thrown_error.h"
#include "cadre/core/os/waiter_listing.h"

namespace cadre {

MeshGroups::MeshGroups(ProcessGroup world, std::string id)
    : world_(std::move(world)), id_(std::move(id)) {}

const ProcessGroup& MeshGroups::group(const std::vector<int>& ranks, const std::string& name) {
  Slot* slot = nullptr;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = slots_.try_emplace(ranks);
    slot = &place->second;
    is_first = is_new;
  }
  if (is_first) fill(*slot, ranks, name);
  if (!is_filled(*slot)) await(*slot, name);
  // No lock is needed here, because a filled slot is never changed.
  if (slot->failure) throw *slot->failure;
  return *slot->group;
}

void MeshGroups::fill(Slot& slot, const std::vector<int>& ranks, const std::string& name) {
  Slot result;
  try {
    result.group = make(ranks, name);
  } catch (const std::exception& thrown) {
    result.failure = error_of(thrown).with_context(format("the group of mesh axis \"{}\"", name));
  }
  const std::lock_guard lock(mutex_);
  slot = std::move(result);
  for (os::Waiter* waiter : waiters_) waiter->unpark();
}

void MeshGroups::await(const Slot& slot, const std::string& name) {
  os::System& system = world_.communicator().system();
  // The thread that creates the group gives up at its own deadline, which is not later than this
  // one.
  const Deadline deadline = system.deadline_in(kDefaultConnectTimeout);
  const std::unique_ptr<os::Waiter> waiter = system.make_waiter();
  const WaiterListing listing(mutex_, waiters_, *waiter);
  while (!is_filled(slot)) {
    if (waiter->park(deadline) || is_filled(slot)) continue;
    throw Error(ErrorCode::kTimeout,
                format("rank {}: another thread has not finished creating the group of mesh axis "
                       "\"{}\" before the deadline; see the error of that thread",
                       world_.rank(), name));
  }
}

bool MeshGroups::is_filled(const Slot& slot) {
  const std::lock_guard lock(mutex_);
  return slot.group || slot.failure;
}

ProcessGroup MeshGroups::make(const std::vector<int>& ranks, const std::string& name) const {
  Fnv1a digest;
  for (const int rank : ranks) digest.add(static_cast<uint64_t>(rank));
  // Only the members make this call, so no common counter can number the groups. The group's id is
  // derived from the ranks instead.
  ProcessGroup group = world_.new_group_over_store(
      ranks, {.store = world_.communicator().membership().store,
              .id = format("{}.{}.{:x}", id_, ranks.front(), digest.value()),
              .name = name});
  world_.communicator().fail_together(group.communicator());
  return group;
}

void MeshGroups::close(Deadline deadline) {
  std::vector<ProcessGroup> made;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [ranks, slot] : slots_) {
      if (slot.group) made.push_back(*slot.group);
    }
  }
  for (const ProcessGroup& group : made) group.communicator().close(deadline);
}

}  // namespace cadre
