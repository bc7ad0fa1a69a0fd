// The parts of a ProcessGroup's call that its Communicator gets: the call with its name and
// deadline, and the tensors as bytes, shape and an owner.
//
// Threads: as a change of the tensors. Blocking: never. Lifetime: bytes and shapes are borrowed
// from the tensors, the group from its handle. Errors: kInvalidArgument for a handle that was moved
// from, and for a timeout that is not positive, before anything was issued. The tensors have been
// checked (tensor_checks.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/comm/abandoned_memory.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/tensor/group/operands/held_memory.h"
#include "cadre/tensor/group/operands/tensor_checks.h"

namespace cadre {

// Returns the group of a handle.
Communicator& group_behind(const std::shared_ptr<Communicator>& handle, std::string_view call);

// Returns the point in time that is `timeout` from now.
Deadline deadline_of(const Communicator& group, std::string_view call, Duration timeout);

struct GroupCall {
  // `call_name` is static text.
  GroupCall(const std::shared_ptr<Communicator>& handle, std::string_view call_name,
            std::optional<Duration> timeout = {});
  GroupCall(Communicator& group_in, std::string_view call_name,
            std::optional<Duration> timeout = {});

  CollectiveOptions options() const { return {.deadline = deadline, .call = name}; }

  Communicator& group;
  const std::string_view name;
  const std::optional<Deadline> deadline;
};

// Marks the values as changed, for autograd. Does nothing for an inference tensor, which has no
// version counter.
void mark_changed(const at::Tensor& tensor);

// Returns the bytes of a contiguous tensor for writing, and marks the tensor as changed.
Bytes bytes_of(const at::Tensor& tensor);
// Returns the bytes of a contiguous tensor for reading.
ConstBytes const_bytes_of(const at::Tensor& tensor);

// Returns the collective with the shape of `compared`, which must be equal on all ranks.
Collective comparing(const at::Tensor& compared, Collective collective);

// Returns a tensor of shape (n) on memory of the buffer. The tensor keeps the buffer.
at::Tensor tensor_on(const std::shared_ptr<SymmetricBuffer>& buffer, Bytes bytes,
                     at::ScalarType dtype);

// Options for a call whose memory the engine may use after the call has returned: they keep the
// tensors' memory until it is done.
template <typename... Tensors>
CollectiveOptions keeping(const GroupCall& call, const Tensors&... tensors) {
  using Kept = std::array<std::shared_ptr<const void>, sizeof...(Tensors)>;
  CollectiveOptions options = call.options();
  options.keep_alive = std::make_shared<const Kept>(Kept{hold_memory(tensors)...});
  return options;
}

// Options for a blocking call. They hold the tensors' memory only if the call may fail before the
// engine has ended, because holding memory needs an allocation.
template <typename... Tensors>
CollectiveOptions blocking(const GroupCall& call, const Tensors&... tensors) {
  return may_use_memory_after_failure(call.group) ? keeping(call, tensors...) : call.options();
}

// Runs `operation` on the tensor's memory, or on a packed copy that is copied back.
template <typename Operation>
void run_packed(const GroupCall& call, const at::Tensor& tensor, Operation operation) {
  if (tensor.is_contiguous()) {
    operation(tensor);
    return;
  }
  check_elements_apart(call.group, call.name, tensor);
  const at::Tensor packed = tensor.variable_data().contiguous();
  operation(packed);
  tensor.variable_data().copy_(packed);
  mark_changed(tensor);
}

}  // namespace cadre
