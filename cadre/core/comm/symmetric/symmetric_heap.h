// Allocates memory of which every rank of a group has a piece that the others can use in place.
//
// Threads: allocate() from the holder of the progress role; buffers from any thread. Blocking:
// allocate(), until the operation's deadline; wait_signal() of a buffer. Lifetime: a buffer keeps
// the memory, also after the heap, the engine and the group are gone. Errors: those of Backend and
// HostMemory. After an error of allocate() peers may still be registered as users of this rank's
// piece; its pages are then not reused. A rank allocates its piece in its own slice, so that the
// pages lie where the rank first touches them. The ranks exchange only the places.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/backend.h"
#include "cadre/core/comm/messages/signal_waits.h"
#include "cadre/core/comm/symmetric/one_sided_access.h"
#include "cadre/core/comm/symmetric/symmetric_buffer.h"
#include "cadre/core/fabric/fork_guard.h"
#include "cadre/core/memory/host_memory.h"
#include "cadre/core/os/system.h"

namespace cadre {

class SymmetricHeap {
 public:
  struct Parts {
    os::System& system;
    Rank rank = 0;
    int world_size = 1;
    Backend* backend = nullptr;  // null for a world of one
    // The buffers use it, too; null if the ranks share no memory.
    std::shared_ptr<HostMemory> memory;
    std::vector<int> slots;                       // slots[r] is the slot of rank r in the memory
    std::shared_ptr<SignalWaits> waits;           // the buffers have weak references to it
    std::shared_ptr<const ForkGuard> fork_guard;  // shared with the group and the buffers
    std::shared_ptr<OneSidedAccess> access;       // shared with the group and the buffers
  };
  // Waits until the engine has ended an operation, and keeps the memory alive until then.
  using Await = std::function<Status(const Completion&, std::shared_ptr<const void> memory)>;

  explicit SymmetricHeap(Parts parts) : parts_(std::move(parts)) {}

  // Returns the bytes of a rank's piece of a buffer: signals and data, in whole pages.
  CADRE_EXPORT static size_t held_bytes(size_t num_bytes, int world_size);

  // Collective: all ranks call it with the same size, which is compared between ranks. If no memory
  // is shared, the buffer has the same interface over private memory.
  Result<std::shared_ptr<SymmetricBuffer>> allocate(const OpContext& op, size_t num_bytes,
                                                    const Await& await);

 private:
  Result<std::shared_ptr<SymmetricBuffer>> allocate_shared(const OpContext& op, size_t num_bytes,
                                                           const Await& await);

  const Parts parts_;
};

}  // namespace cadre
