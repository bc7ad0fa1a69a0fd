// The tensors of an operation as a Communicator takes them: bytes, shape, and an owner.
//
// Threads: as a change of the tensors. Blocking: never. Lifetime: bytes and shapes are borrowed
// from the tensors. Errors: none; the tensors have been checked (tensor_checks.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <span>

#include "cadre/base/deadline.h"
#include "cadre/base/types.h"
#include "cadre/collective/collective.h"
#include "cadre/comm/calls/abandoned_memory.h"
#include "cadre/comm/communicator.h"
#include "cadre/group/held_memory.h"

namespace cadre {

// Tells autograd that the values change. An inference tensor has no version counter.
void mark_changed(const at::Tensor& tensor);

// To be written: marks the tensor as changed. Contiguous.
Bytes bytes_of(const at::Tensor& tensor);
// To be read. Contiguous.
ConstBytes const_bytes_of(const at::Tensor& tensor);

// `compared` is the tensor whose shape must be the same on all ranks.
Collective comparing(const at::Tensor& compared, Collective collective);

std::optional<Deadline> deadline_of(const Communicator& communicator,
                                    std::optional<Duration> timeout);

// (n) on memory of the buffer, which the tensor keeps.
at::Tensor tensor_on(const std::shared_ptr<SymmetricBuffer>& buffer, Bytes bytes,
                     at::ScalarType dtype);

// Of a call whose memory the engine may use after the call has returned: keeps the tensors' memory
// until it is done.
template <typename... Tensors>
CollectiveOptions keeping(std::optional<Deadline> deadline, const Tensors&... tensors) {
  using Kept = std::array<std::shared_ptr<const void>, sizeof...(Tensors)>;
  return {.deadline = deadline,
          .keep_alive = std::make_shared<const Kept>(Kept{hold_memory(tensors)...})};
}

// Of a blocking call. It holds the tensors' memory only where the call may fail before the engine
// has ended, because holding it allocates.
template <typename... Tensors>
CollectiveOptions blocking(const Communicator& communicator, std::optional<Duration> timeout,
                           const Tensors&... tensors) {
  const std::optional<Deadline> deadline = deadline_of(communicator, timeout);
  if (!may_use_memory_after_failure(communicator)) return {.deadline = deadline};
  return keeping(deadline, tensors...);
}

}  // namespace cadre
