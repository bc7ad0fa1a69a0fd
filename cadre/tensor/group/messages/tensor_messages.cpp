// Sends and receives tensors for the program and for wrappers.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/core/comm/checks.h"
#include "cadre/core/comm/message_calls.h"
#include "cadre/core/comm/messages/message_call.h"
#include "cadre/tensor/group/group_work.h"
#include "cadre/tensor/group/messages/private_messages.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/held_memory.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/operands/tensor_checks.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {
namespace {

DType check_message_tensor(const GroupCall& call, std::string_view role, const at::Tensor& tensor) {
  const DType dtype = check_tensor(call.group, call.name, role, tensor);
  check_on_cpu(call.group, call.name, role, tensor);
  return dtype;
}

void send_tensor(const GroupCall& call, const MessageSpace& space, const at::Tensor& tensor,
                 int destination, int tag) {
  const DType dtype = check_message_tensor(call, kInput, tensor);
  const at::Tensor packed = tensor.detach().contiguous();
  run_message(call.group, space, MessageCall::send(const_bytes_of(packed), dtype, destination, tag),
              call.options());
}

Work send_tensor_async(const GroupCall& call, const MessageSpace& space, const at::Tensor& tensor,
                       int destination, int tag) {
  const DType dtype = check_message_tensor(call, kInput, tensor);
  const at::Tensor packed = tensor.detach().contiguous();
  const MessageCall message = MessageCall::send(const_bytes_of(packed), dtype, destination, tag);
  return issue_messages(call.group, space, {&message, 1}, keeping(call, packed)).front();
}

// Receives from `source`, or from any rank if it is nullopt. Returns the sender.
Rank recv_tensor(const GroupCall& call, const MessageSpace& space, const at::Tensor& tensor,
                 std::optional<Rank> source, int tag) {
  const DType dtype = check_message_tensor(call, kInPlace, tensor);
  Rank sender = kAnySource;
  run_packed(call, tensor, [&](const at::Tensor& data) {
    if (source) check_peer(call.group, call.name, *source);
    sender = run_message(call.group, space,
                         MessageCall::recv(bytes_of(data), dtype, source.value_or(kAnySource), tag),
                         call.options());
  });
  return sender;
}

Work recv_tensor_async(const GroupCall& call, const MessageSpace& space, const at::Tensor& tensor,
                       int source, int tag) {
  const DType dtype = check_message_tensor(call, kInPlace, tensor);
  check_contiguous(call.group, call.name, kInPlace, tensor);
  check_peer(call.group, call.name, source);
  const MessageCall message = MessageCall::recv(bytes_of(tensor), dtype, source, tag);
  return issue_messages(call.group, space, {&message, 1}, keeping(call, tensor)).front();
}

void check_message(const GroupCall& call, const P2POp& op) {
  const bool is_send = op.kind == P2POp::Kind::kSend;
  check_message_tensor(call, is_send ? kInput : kInPlace, op.tensor);
  if (!is_send) check_contiguous(call.group, call.name, kOutput, op.tensor);
  check_peer(call.group, call.name, op.peer);
}

Work issue_batch(const GroupCall& call, const MessageSpace& space, const std::vector<P2POp>& ops) {
  for (const P2POp& op : ops) check_message(call, op);
  std::vector<MessageCall> messages;
  std::vector<std::shared_ptr<const void>> kept;
  for (const P2POp& op : ops) {
    const DType dtype = *to_dtype(op.tensor.scalar_type());
    if (op.kind == P2POp::Kind::kSend) {
      const at::Tensor packed = op.tensor.detach().contiguous();
      messages.push_back(MessageCall::send(const_bytes_of(packed), dtype, op.peer, op.tag));
      kept.push_back(hold_memory(packed));
    } else {
      messages.push_back(MessageCall::recv(bytes_of(op.tensor), dtype, op.peer, op.tag));
      kept.push_back(hold_memory(op.tensor));
    }
  }
  CollectiveOptions options = call.options();
  options.keep_alive = std::make_shared<const decltype(kept)>(std::move(kept));
  return all_of(issue_messages(call.group, space, messages, options));
}

}  // namespace

void ProcessGroup::send(const at::Tensor& tensor, int destination,
                        const MessageOptions& options) const {
  send_tensor({communicator_, "send", options.timeout}, {}, tensor, destination, options.tag);
}

Work ProcessGroup::send_async(const at::Tensor& tensor, int destination,
                              const MessageOptions& options) const {
  const GroupCall call(communicator_, "send_async", options.timeout);
  return send_tensor_async(call, {}, tensor, destination, options.tag);
}

void ProcessGroup::recv(const at::Tensor& tensor, int source, const MessageOptions& options) const {
  const GroupCall call(communicator_, "recv", options.timeout);
  recv_tensor(call, {}, tensor, source, options.tag);
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int source,
                              const MessageOptions& options) const {
  const GroupCall call(communicator_, "recv_async", options.timeout);
  return recv_tensor_async(call, {}, tensor, source, options.tag);
}

int ProcessGroup::recv_from_any(const at::Tensor& tensor, const MessageOptions& options) const {
  const GroupCall call(communicator_, "recv_from_any", options.timeout);
  return recv_tensor(call, {}, tensor, std::nullopt, options.tag);
}

void ProcessGroup::batch_send_recv(const std::vector<P2POp>& ops,
                                   const BatchOptions& options) const {
  issue_batch({communicator_, "batch_send_recv", options.timeout}, {}, ops).wait();
}

Work ProcessGroup::batch_send_recv_async(const std::vector<P2POp>& ops,
                                         const BatchOptions& options) const {
  return issue_batch({communicator_, "batch_send_recv_async", options.timeout}, {}, ops);
}

PrivateMessages::PrivateMessages(ProcessGroup group, std::string_view user)
    : group_(std::move(group)), space_(reserve_message_space(group_.communicator(), user)) {}

void PrivateMessages::send(const at::Tensor& tensor, int destination,
                           const MessageOptions& options) const {
  const GroupCall call(group_.communicator(), "send", options.timeout);
  send_tensor(call, space_, tensor, destination, options.tag);
}

Work PrivateMessages::send_async(const at::Tensor& tensor, int destination,
                                 const MessageOptions& options) const {
  const GroupCall call(group_.communicator(), "send_async", options.timeout);
  return send_tensor_async(call, space_, tensor, destination, options.tag);
}

void PrivateMessages::recv(const at::Tensor& tensor, int source,
                           const MessageOptions& options) const {
  const GroupCall call(group_.communicator(), "recv", options.timeout);
  recv_tensor(call, space_, tensor, source, options.tag);
}

Work PrivateMessages::recv_async(const at::Tensor& tensor, int source,
                                 const MessageOptions& options) const {
  const GroupCall call(group_.communicator(), "recv_async", options.timeout);
  return recv_tensor_async(call, space_, tensor, source, options.tag);
}

int PrivateMessages::recv_from_any(const at::Tensor& tensor, const MessageOptions& options) const {
  const GroupCall call(group_.communicator(), "recv_from_any", options.timeout);
  return recv_tensor(call, space_, tensor, std::nullopt, options.tag);
}

Work PrivateMessages::batch_send_recv_async(const std::vector<P2POp>& ops,
                                            const BatchOptions& options) const {
  const GroupCall call(group_.communicator(), "batch_send_recv_async", options.timeout);
  return issue_batch(call, space_, ops);
}

}  // namespace cadre
