// Memory of which every rank of a group holds a piece that the others can read in place.
//
// Threads: allocate() from the holder of the progress role; buffers may be freed from any thread.
// Blocking: allocate(), until the operation's deadline. Lifetime: a buffer keeps its mapping, also
// after the heap, the engine and the group are gone, and tells the engine while that lives.
// Errors: as Backend and HostGroup.
// One segment for each buffer, made by the host's lowest rank, with a slice for each rank: one
// descriptor to hand out, and a rank's pages lie where that rank first touches them.
#pragma once

#include <cstdint>
#include <memory>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/collective/host/host_engine.h"
#include "cadre/comm/bootstrap/host_group.h"
#include "cadre/comm/communicator.h"
#include "cadre/comm/home_process.h"
#include "cadre/os/interrupt.h"
#include "cadre/os/system.h"

namespace cadre {

class SymmetricHeap {
 public:
  // Over shared memory. `engine` is shared with the buffers, which must not outlive its use of
  // them.
  SymmetricHeap(os::System& system, os::Interrupt& interrupt, HostGroup& host,
                std::shared_ptr<HostEngine> engine, std::shared_ptr<const HomeProcess> home);

  // Collective: all ranks with the same size. The first meeting of the ranks compares the sizes.
  Result<std::shared_ptr<SymmetricBuffer>> allocate(const OpContext& op, size_t num_bytes);

  // With the same interface, for groups that share no memory.
  static std::shared_ptr<SymmetricBuffer> allocate_private(size_t num_bytes);

 private:
  os::System& system_;
  os::Interrupt& interrupt_;
  HostGroup& host_;
  std::shared_ptr<HostEngine> engine_;
  std::shared_ptr<const HomeProcess> home_;  // shared with the group and the buffers
  uint32_t last_id_ = 0;
};

}  // namespace cadre
