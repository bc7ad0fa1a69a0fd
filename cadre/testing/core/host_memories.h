// Makes the shared memory of the ranks of one host for tests: one HostMemory for each slot (rank).
//
// Lifetime: call it before the ranks start, so that threads share the mapping and forked processes
// inherit it. Errors: throws.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cadre/core/memory/host_memory.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/scarce_memory.h"

namespace cadre::testing {

// `num_free` has the number of bytes that each slot can commit. If it is empty, only the machine
// limits them.
inline std::vector<std::shared_ptr<HostMemory>> make_host_memories(
    os::System& system, const HostMemoryLayout& layout, const std::vector<size_t>& num_free = {}) {
  const std::shared_ptr<os::SharedMemory> segment =
      system.create_segment(HostMemory::segment_bytes(layout)).value_or_throw();
  std::vector<std::shared_ptr<HostMemory>> memories;
  for (int slot = 0; slot < layout.num_slots; ++slot) {
    std::shared_ptr<os::SharedMemory> seen = segment;
    if (!num_free.empty()) {
      seen = std::make_shared<ScarceMemory>(segment, num_free[static_cast<size_t>(slot)]);
    }
    memories.push_back(HostMemory::attach(std::move(seen), layout, slot).value_or_throw());
  }
  return memories;
}

inline std::vector<int> all_slots(int num_slots) {
  std::vector<int> slots;
  for (int slot = 0; slot < num_slots; ++slot) slots.push_back(slot);
  return slots;
}

}  // namespace cadre::testing
