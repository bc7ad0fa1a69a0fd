// A tensor of the same size on every rank of a group, in memory that the ranks of a host share:
// each rank reads and writes the others' tensors in place, and signals to the others.
//
// Threads: as ProcessGroup. Blocking: allocate(), a collective, and wait_signal(). Lifetime: a
// value over shared state; its tensors keep the memory, even after the group is closed. Errors:
// those of the group; kInvalidArgument for another rank if shares_memory() is false, and after this
// object was moved from. After the first failure of the group peer(), signal() and wait_signal()
// throw it. local() then keeps its content, as SymmetricBuffer says; tensors of peers that were
// taken before stay valid, but their values are undefined. Operations or signals must order the
// accesses of the ranks: what was written before signal() is seen after wait_signal(). Source:
// SymmetricBuffer, which has the same in bytes; torch.distributed._symmetric_memory. Guide:
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

struct WaitSignalOptions {
  std::optional<Duration> timeout = {};  // default: the group's timeout
};

class CADRE_EXPORT SymmetricTensor {
 public:
  // numel: elements of each rank's tensor, at least 1. numel and dtype are equal on all ranks. The
  // memory is zeroed.
  static SymmetricTensor allocate(const ProcessGroup& group, int64_t numel, at::ScalarType dtype);

  // Returns this rank's tensor, (numel).
  const at::Tensor& local() const;
  // Returns whether this rank reaches the tensors of the other ranks; false over TCP and in a world
  // of one.
  bool shares_memory() const;
  // Returns the tensor of `rank`, (numel); `rank` may be this rank.
  at::Tensor peer(int rank) const;
  // Sends one more signal to a rank. slot: below SymmetricBuffer::kNumSignals. Never blocks.
  void signal(int rank, uint32_t slot) const;
  // Consumes one signal from a rank, and waits for it if there is none yet. A timeout is a failure
  // of the group and names the rank.
  void wait_signal(int rank, uint32_t slot, const WaitSignalOptions& options = {}) const;

 private:
  SymmetricTensor(ProcessGroup group, std::shared_ptr<SymmetricBuffer> buffer, at::Tensor local)
      : group_(std::move(group)), buffer_(std::move(buffer)), local_(std::move(local)) {}
  // Returns the buffer; throws an error that names `call` if this object was moved from.
  SymmetricBuffer& buffer(std::string_view call) const;

  ProcessGroup group_;
  std::shared_ptr<SymmetricBuffer> buffer_;  // shared with the tensors
  at::Tensor local_;
};

}  // namespace cadre
