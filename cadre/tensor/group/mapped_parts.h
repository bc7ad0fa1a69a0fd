// Memory of which every rank of a group owns an equal part, with all parts mapped contiguously: a
// rank reads what another has written without a copy.
//
// Threads: one at a time. Blocking: allocate(), a collective, and wait_for_peers(), until the
// group's deadline. Lifetime: shares the group; the tensors keep their memory, even when the group
// and this object are gone. Errors: those of the group; kInvalidArgument after this object was
// moved from. After a failure of the group the tensors stay valid, but their values are undefined
// except for this rank's own part, to which this rank alone writes.
// Only the owner of a part writes to it. Operations or signals must separate these writes from the
// reads of other ranks. Source: symmetric memory of NVSHMEM and
// torch.distributed._symmetric_memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

class CADRE_EXPORT MappedParts {
 public:
  // The size of a part in bytes is a multiple of this number.
  static constexpr int64_t kPageBytes = 4096;

  // numel: elements of each part, at least 1. Throws kInvalidArgument unless numel elements of
  // dtype fill a multiple of kPageBytes. numel and dtype are the same on all ranks. The memory is
  // zeroed. Returns nullopt on all ranks if the ranks share no memory or one of them cannot map it.
  // In a world of one the memory is private.
  static std::optional<MappedParts> allocate(const ProcessGroup& group, int64_t numel,
                                             at::ScalarType dtype);

  // Returns all parts in rank order, (world_size * numel). Throws the failure of the group, if it
  // has failed.
  const at::Tensor& whole() const;
  // Returns the same tensor as whole(), also in a failed group, for a look at the last writes of a
  // lost rank.
  const at::Tensor& whole_after_failure() const;
  // Returns the part of this rank, (numel), which has a storage of its own.
  const at::Tensor& own() const;

  // Signals all other ranks. slot: below SymmetricBuffer::kNumSignals. Never blocks.
  void signal_peers(uint32_t slot) const;
  // Consumes one signal of each other rank. What these ranks wrote before their signals is visible
  // afterwards. A timeout names the missing rank.
  void wait_for_peers(uint32_t slot) const;
  // Throws the failure of the group, if it has failed; else returns at once. Meant for a loop that
  // reads or writes parts without an operation of the group, and so would not notice the loss of a
  // rank. It signals this rank itself in `slot`, which no other call may use.
  void check_group(uint32_t slot) const;
  // Returns the ranks of the group that were killed or have left.
  std::vector<int> lost_ranks() const;

 private:
  MappedParts(const ProcessGroup& group, std::shared_ptr<SymmetricBuffer> buffer)
      : group_(group), buffer_(std::move(buffer)) {}
  Deadline deadline() const;
  // Returns this object; throws an error that names `call` if the object was moved from.
  const MappedParts& checked(std::string_view call) const;

  ProcessGroup group_;
  std::shared_ptr<SymmetricBuffer> buffer_;  // shared with the tensors
  at::Tensor whole_;
  at::Tensor own_;
};

}  // namespace cadre
