// A symmetric tensor: every rank of a group has a tensor of the same size in memory that the ranks
// of a host share, reads and writes the tensors of other ranks in place, and sends signals to them.
// Collectives on local() need no copy into a staging buffer.
//
// Threads: as ProcessGroup. Blocking: allocate(), a collective, wait_signal() and wait_for_peers().
// Lifetime: a value over shared state; its tensors keep the memory, even after the group is closed.
// Errors: those of the group; kInvalidArgument for another rank if shares_memory() is false, for
// whole() if has_whole() is false, and after this object was moved from. After a failure of the
// group, peer(), whole(), the signals and the waits throw it. local() keeps its content; tensors
// that peer() and whole() have returned before stay valid, but their values are undefined. The
// program must order the accesses of different ranks with operations or signals: data that was
// written before a signal is visible after the wait for that signal. Source: SymmetricBuffer, the
// same for bytes; NVSHMEM; torch.distributed._symmetric_memory. Guide:
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
  // Also maps the tensors of all ranks to consecutive addresses, for whole(). The size of a rank's
  // tensor must then be a multiple of SymmetricTensor::kPageBytes.
  bool with_whole = false;
};

struct WaitSignalOptions {
  std::optional<Duration> timeout = {};  // the default is the group's timeout
};

class CADRE_EXPORT SymmetricTensor {
 public:
  static constexpr int64_t kPageBytes = 4096;

  // `numel` is the number of elements of each rank's tensor, at least 1. All ranks pass the same
  // arguments. The memory is zeroed. It is not shared if the ranks communicate over TCP, or in a
  // world of one.
  static SymmetricTensor allocate(const ProcessGroup& group, int64_t numel, at::ScalarType dtype,
                                  const SymmetricTensorOptions& options = {});

  // Returns this rank's tensor, (numel), which has a storage of its own.
  const at::Tensor& local() const;
  // Returns whether this rank can access the tensors of the other ranks. False over TCP and in a
  // world of one.
  bool shares_memory() const;
  // Returns the tensor of `rank`, (numel); `rank` may be this rank.
  at::Tensor peer(int rank) const;
  // Returns whether whole() is available: with_whole was set, the ranks share memory, and each of
  // them could map the tensors to consecutive addresses. Equal on all ranks; with with_whole true
  // in a world of one, too.
  bool has_whole() const;
  // Returns the tensors of all ranks in rank order, (world_size * numel). A rank that writes to it
  // writes to its own part only.
  const at::Tensor& whole() const;
  // Sends a signal to a rank, which may be this rank. Each slot, a number below
  // SymmetricBuffer::kNumSignals, counts its own signals. Never blocks.
  void signal(int rank, uint32_t slot) const;
  // Consumes one signal from a rank; waits if none has arrived. A timeout makes the group fail, and
  // its error names the rank.
  void wait_signal(int rank, uint32_t slot, const WaitSignalOptions& options = {}) const;
  // signal_peers() sends one signal to each other rank, and wait_for_peers() consumes one from
  // each. The timeout is the limit of all these waits together.
  void signal_peers(uint32_t slot) const;
  void wait_for_peers(uint32_t slot, const WaitSignalOptions& options = {}) const;

 private:
  SymmetricTensor(ProcessGroup group, std::shared_ptr<SymmetricBuffer> buffer, at::Tensor local)
      : group_(std::move(group)), buffer_(std::move(buffer)), local_(std::move(local)) {}
  // Returns the buffer; throws an error that names `call` if this object was moved from.
  SymmetricBuffer& buffer(std::string_view call) const;
  Deadline deadline_of_wait(std::string_view call, const WaitSignalOptions& options) const;

  ProcessGroup group_;
  std::shared_ptr<SymmetricBuffer> buffer_;  // kept alive also by the tensors that use it
  at::Tensor local_;
  at::Tensor whole_;  // undefined unless has_whole()
};

}  // namespace cadre
