// Converts a call of ProcessGroup to what the Communicator below it takes: the name and deadline of
// the call, and each tensor as bytes, a shape and an owner of the memory.
//
// Threads: the rules for a change of the tensors apply. Blocking: never. Lifetime: bytes and shapes
// are borrowed from the tensors, the group from its handle. Errors: kInvalidArgument for a handle
// that was moved from, and for a timeout that is not positive, before anything was issued. The
// tensors have been checked (tensor_checks.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/comm/abandoned_memory.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/tensor/group/operands/held_memory.h"
#include "cadre/tensor/group/operands/tensor_checks.h"

namespace cadre {

// Returns the communicator of a handle. Throws if the handle was moved from.
Communicator& group_behind(const std::shared_ptr<Communicator>& handle, std::string_view call);

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

// Adds the shape of `compared` to the collective, so that the ranks compare it and a difference is
// an error.
Collective comparing(const at::Tensor& compared, Collective collective);

// Returns a 1-dim tensor over `bytes`, a range of the buffer. The tensor keeps the buffer alive.
at::Tensor tensor_on(const std::shared_ptr<SymmetricBuffer>& buffer, Bytes bytes,
                     at::ScalarType dtype);

// Returns options for an operation that may use the tensors' memory after the call has returned.
// They keep the memory until the operation is done.
template <typename... Tensors>
CollectiveOptions keeping(const GroupCall& call, const Tensors&... tensors) {
  using Kept = std::array<std::shared_ptr<const void>, sizeof...(Tensors)>;
  CollectiveOptions options = call.options();
  options.keep_alive = std::make_shared<const Kept>(Kept{hold_memory(tensors)...});
  return options;
}

// Says where the memory of a collective is: on the device of the tensors, behind the work that the
// calling thread has enqueued on it so far. Tensors that are undefined are ignored. Throws if the
// tensors are on several devices.
void place(const GroupCall& call, Collective& collective,
           std::initializer_list<const at::Tensor*> tensors);

// Issues a collective on the memory of the tensors, which is kept until it is done. The tensors are
// all those whose memory the collective uses.
template <typename... Tensors>
Work issue_on(const GroupCall& call, Collective collective, const Tensors&... tensors) {
  place(call, collective, {&tensors...});
  return call.group.issue(std::move(collective), keeping(call, tensors...));
}

// Does the same for a blocking call. It keeps the memory only if the engine may still use it when
// the call has returned; otherwise the allocation for that is saved.
template <typename... Tensors>
void run_on(const GroupCall& call, Collective collective, const Tensors&... tensors) {
  place(call, collective, {&tensors...});
  const bool keeps = may_use_memory_after_return(call.group, collective.device.type);
  call.group.run(std::move(collective), keeps ? keeping(call, tensors...) : call.options());
}

// Runs an in-place `operation` on the tensor if it is contiguous. Otherwise runs it on a contiguous
// copy and copies the result back.
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
