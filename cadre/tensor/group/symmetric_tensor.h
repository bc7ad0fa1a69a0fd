// A tensor of the same size on every rank of a group, in memory that the ranks of a host share:
// each rank reads and writes the others' tensors in place, and signals to the others. Collectives
// on local() need no copy into a staging area.
//
// Threads: as ProcessGroup. Blocking: allocate(), a collective, wait_signal() and wait_for_peers().
// Lifetime: a value over shared state; its tensors keep the memory, even after the group is closed.
// Errors: those of the group; kInvalidArgument for another rank if shares_memory() is false, for
// whole() if has_whole() is false, and after this object was moved from. After the first failure of
// the group peer(), whole(), the signals and the waits throw it. local() then keeps its content, as
// SymmetricBuffer says; tensors of peers and of whole() that were taken before stay valid, but
// their values are undefined. Operations or signals must order the accesses of the ranks: what was
// written before a signal is seen after the wait for it. Source: SymmetricBuffer, which has the
// same in bytes; NVSHMEM; torch.distributed._symmetric_memory. Guide:
// docs/guide/reference/groups-and-messages.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

struct SymmetricTensorOptions {
  // The tensors of all ranks are also mapped side by side, as whole(). The tensor of a rank then
  // fills whole pages of SymmetricTensor::kPageBytes.
  bool with_whole = false;
};

struct WaitSignalOptions {
  std::optional<Duration> timeout = {};  // the default is the group's timeout
};

class CADRE_EXPORT SymmetricTensor {
 public:
  static constexpr int64_t kPageBytes = 4096;

  // `numel` is the number of elements of each rank's tensor, at least 1. All ranks pass the same
  // arguments. The memory is zeroed; over TCP and in a world of one it is plain memory.
  static SymmetricTensor allocate(const ProcessGroup& group, int64_t numel, at::ScalarType dtype,
                                  const SymmetricTensorOptions& options = {});

  // Returns this rank's tensor, (numel), which has a storage of its own.
  const at::Tensor& local() const;
  // Returns whether this rank reaches the tensors of the other ranks; false over TCP and in a world
  // of one.
  bool shares_memory() const;
  // Returns the tensor of `rank`, (numel); `rank` may be this rank.
  at::Tensor peer(int rank) const;
  // Returns whether the tensors of all ranks are mapped side by side, as with_whole asked: if the
  // ranks share memory, and each of them could map it. Equal on all ranks; true in a world of one.
  bool has_whole() const;
  // Returns the tensors of all ranks in rank order, (world_size * numel). A rank that writes to it
  // writes to its own part only.
  const at::Tensor& whole() const;
  // Sends one more signal to a rank, which may be this rank. slot: below
  // SymmetricBuffer::kNumSignals. Never blocks.
  void signal(int rank, uint32_t slot) const;
  // Consumes one signal from a rank, and waits for it if there is none yet. A timeout is a failure
  // of the group and names the rank.
  void wait_signal(int rank, uint32_t slot, const WaitSignalOptions& options = {}) const;
  // These send one signal to each other rank, and take one from each. The timeout is for all waits
  // together.
  void signal_peers(uint32_t slot) const;
  void wait_for_peers(uint32_t slot, const WaitSignalOptions& options = {}) const;

 private:
  SymmetricTensor(ProcessGroup group, std::shared_ptr<SymmetricBuffer> buffer, at::Tensor local)
      : group_(std::move(group)), buffer_(std::move(buffer)), local_(std::move(local)) {}
  // Returns the buffer; throws an error that names `call` if this object was moved from.
  SymmetricBuffer& buffer(std::string_view call) const;
  Deadline deadline_of_wait(std::string_view call, const WaitSignalOptions& options) const;

  ProcessGroup group_;
  std::shared_ptr<SymmetricBuffer> buffer_;  // the tensors share it
  at::Tensor local_;
  at::Tensor whole_;  // is undefined unless has_whole()
};

}  // namespace cadre
