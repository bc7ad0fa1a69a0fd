// Sends and receives tensors for the program and for wrappers.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/core/comm/checks.h"
#include "cadre/core/comm/message_calls.h"
#include "cadre/core/comm/messages/message_call.h"
#include "cadre/core/comm/messages/send_gate.h"
#include "cadre/tensor/device/pinned_tensor.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/group/group_work.h"
#include "cadre/tensor/group/messages/private_messages.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/held_memory.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/operands/tensor_checks.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {
namespace {

// The messages of one call. Those of tensors on the CPU use the memory of the tensors. Those of
// tensors on a device go through pinned memory: what is sent is copied there behind the work that
// the current stream has at the call, and the bytes are sent when the device has made the copies.
class StagedMessages {
 public:
  explicit StagedMessages(const GroupCall& call) : call_(call) {}

  void add_send(const at::Tensor& tensor, DType dtype, Rank destination, int tag) {
    const at::Tensor packed = tensor.detach().contiguous();
    keep(packed);
    const at::Tensor sent = packed.is_cpu() ? packed : copy_on_host(packed);
    messages_.push_back(MessageCall::send(const_bytes_of(sent), dtype, destination, tag));
    landings_.emplace_back();
  }

  // `tensor` is contiguous.
  void add_recv(const at::Tensor& tensor, DType dtype, Rank source, int tag) {
    keep(tensor);
    if (tensor.is_cpu()) {
      messages_.push_back(MessageCall::recv(bytes_of(tensor), dtype, source, tag));
      landings_.emplace_back();
      return;
    }
    mark_changed(tensor);
    const at::Tensor host =
        device::empty_pinned(tensor.device().type(), tensor.sizes(), tensor.scalar_type());
    kept_.push_back(hold_memory(host));
    messages_.push_back(MessageCall::recv(bytes_of(host), dtype, source, tag));
    landings_.push_back({.host = host, .target = tensor.variable_data()});
  }

  // Runs the only message. Returns the peer.
  Rank run(const MessageSpace& space) {
    const Rank peer = run_message(call_.group, space, messages_.front(), call_.options(), gate());
    land(landings_.front());
    return peer;
  }

  std::vector<Work> issue(const MessageSpace& space) {
    std::vector<Work> works = issue_messages(call_.group, space, messages_, keeping_all(), gate());
    for (size_t i = 0; i < works.size(); ++i) {
      const Landing& landing = landings_[i];
      if (!landing.target.defined()) continue;
      const c10::Device device = landing.target.device();
      works[i] = finish_after(
          std::move(works[i]),
          [landing, called = device::StreamPoint::on_current_stream(device)] {
            // What the stream of the call does to the tensor comes before the message.
            called.order_current_stream().value_or_throw();
            land(landing);
          },
          device);
    }
    return works;
  }

 private:
  // A message that is received in memory of the host for a tensor of a device.
  struct Landing {
    at::Tensor host = {};
    at::Tensor target = {};  // undefined if the message goes to its tensor
  };

  // Autograd does not see the copy, which the call has marked already, and which the caller's mode
  // at the wait must not forbid.
  static void land(const Landing& landing) {
    if (!landing.target.defined()) return;
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    landing.target.copy_(landing.host, /*non_blocking=*/true);
  }

  at::Tensor copy_on_host(const at::Tensor& packed) {
    const at::Tensor host =
        device::empty_pinned(packed.device().type(), packed.sizes(), packed.scalar_type());
    const at::NoGradGuard no_grad;
    host.copy_(packed, /*non_blocking=*/true);
    kept_.push_back(hold_memory(host));
    gate_at_ = packed.device();
    return host;
  }

  SendGate gate() const {
    if (!gate_at_) return nullptr;
    return [copied = device::StreamPoint::on_current_stream(*gate_at_)] {
      return copied.has_happened();
    };
  }

  void keep(const at::Tensor& tensor) { kept_.push_back(hold_memory(tensor)); }
  CollectiveOptions keeping_all() {
    CollectiveOptions options = call_.options();
    options.keep_alive = std::make_shared<const decltype(kept_)>(std::move(kept_));
    return options;
  }

  const GroupCall& call_;
  std::vector<MessageCall> messages_;
  std::vector<Landing> landings_;  // one for each message
  std::vector<std::shared_ptr<const void>> kept_;
  std::optional<c10::Device> gate_at_;  // the device from which a send is copied
};

void send_tensor(const GroupCall& call, const MessageSpace& space, const at::Tensor& tensor,
                 int destination, int tag) {
  const DType dtype = check_tensor(call.group, call.name, kInput, tensor);
  if (tensor.is_cpu()) {
    const at::Tensor packed = tensor.detach().contiguous();
    run_message(call.group, space,
                MessageCall::send(const_bytes_of(packed), dtype, destination, tag), call.options());
    return;
  }
  StagedMessages messages(call);
  messages.add_send(tensor, dtype, destination, tag);
  messages.run(space);
}

Work send_tensor_async(const GroupCall& call, const MessageSpace& space, const at::Tensor& tensor,
                       int destination, int tag) {
  const DType dtype = check_tensor(call.group, call.name, kInput, tensor);
  StagedMessages messages(call);
  messages.add_send(tensor, dtype, destination, tag);
  return messages.issue(space).front();
}

// Receives from `source`, or from any rank if it is nullopt. Returns the sender.
Rank recv_tensor(const GroupCall& call, const MessageSpace& space, const at::Tensor& tensor,
                 std::optional<Rank> source, int tag) {
  const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
  Rank sender = kAnySource;
  run_packed(call, tensor, [&](const at::Tensor& data) {
    if (source) check_peer(call.group, call.name, *source);
    const Rank from = source.value_or(kAnySource);
    if (data.is_cpu()) {
      sender = run_message(call.group, space, MessageCall::recv(bytes_of(data), dtype, from, tag),
                           call.options());
      return;
    }
    StagedMessages messages(call);
    messages.add_recv(data, dtype, from, tag);
    sender = messages.run(space);
  });
  return sender;
}

Work recv_tensor_async(const GroupCall& call, const MessageSpace& space, const at::Tensor& tensor,
                       int source, int tag) {
  const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
  check_contiguous(call.group, call.name, kInPlace, tensor);
  check_peer(call.group, call.name, source);
  StagedMessages messages(call);
  messages.add_recv(tensor, dtype, source, tag);
  return messages.issue(space).front();
}

void check_message(const GroupCall& call, const P2POp& op) {
  const bool is_send = op.kind == P2POp::Kind::kSend;
  check_tensor(call.group, call.name, is_send ? kInput : kInPlace, op.tensor);
  if (!is_send) check_contiguous(call.group, call.name, kOutput, op.tensor);
  check_peer(call.group, call.name, op.peer);
}

Work issue_batch(const GroupCall& call, const MessageSpace& space, const std::vector<P2POp>& ops) {
  for (const P2POp& op : ops) check_message(call, op);
  StagedMessages messages(call);
  for (const P2POp& op : ops) {
    const DType dtype = *to_dtype(op.tensor.scalar_type());
    if (op.kind == P2POp::Kind::kSend) {
      messages.add_send(op.tensor, dtype, op.peer, op.tag);
    } else {
      messages.add_recv(op.tensor, dtype, op.peer, op.tag);
    }
  }
  return all_of(messages.issue(space));
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
