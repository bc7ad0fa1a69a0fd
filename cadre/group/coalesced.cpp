// The operations of a ProcessGroup of which one call issues several.
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/group/dtype.h"
#include "cadre/group/group_work.h"
#include "cadre/group/operands.h"
#include "cadre/group/process_group.h"
#include "cadre/group/tensor_checks.h"

namespace cadre {
namespace {

// An operation that has been checked and is not issued yet, with the tensors that it keeps.
struct Ready {
  Collective collective;
  at::Tensor output;
  at::Tensor input;
};

Work issue_all(Communicator& communicator, const std::vector<Ready>& operations,
               std::optional<Duration> timeout) {
  const std::optional<Deadline> deadline = deadline_of(communicator, timeout);
  std::vector<Work> works;
  for (const Ready& ready : operations) {
    works.push_back(
        communicator.issue(ready.collective, keeping(deadline, ready.output, ready.input)));
  }
  return all_of(std::move(works));
}

void check_same_length(const Communicator& communicator, std::string_view call,
                       const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs) {
  if (outputs.size() == inputs.size()) return;
  refuse_tensor(communicator, call,
                format("there are {} outputs for {} inputs; pass one for each", outputs.size(),
                       inputs.size()));
}

// Of all_gather_into_tensor or, with a reduction, reduce_scatter_tensor.
std::vector<Ready> ready_pairs(const Communicator& communicator, std::string_view call,
                               const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, std::optional<Reduction> op) {
  check_same_length(communicator, call, outputs, inputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const DType dtype =
        check_pair(communicator, call, outputs[i], inputs[i], /*output_is_large=*/!op);
    if (op) check_reduce_op(communicator, call, dtype, op->op());
  }
  std::vector<Ready> ready;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const DType dtype = *to_dtype(inputs[i].scalar_type());
    const ConstBytes in = const_bytes_of(inputs[i]);
    const Bytes out = bytes_of(outputs[i]);
    ready.push_back({op ? comparing(outputs[i], Collective::reduce_scatter(in, out, dtype, *op))
                        : comparing(inputs[i], Collective::all_gather(in, out, dtype)),
                     outputs[i], inputs[i]});
  }
  return ready;
}

void check_message(const Communicator& communicator, const P2POp& op) {
  constexpr std::string_view kCall = "batch_send_recv";
  const bool is_send = op.kind == P2POp::Kind::kSend;
  check_tensor(communicator, kCall, is_send ? kInput : kInPlace, op.tensor);
  if (!is_send) check_contiguous(communicator, kCall, kOutput, op.tensor);
  if (op.peer >= 0 && op.peer < communicator.world_size() && op.peer != communicator.rank()) return;
  refuse_tensor(communicator, kCall,
                format("the peer {} is not another rank of the group of {}", op.peer,
                       communicator.world_size()));
}

}  // namespace

void ProcessGroup::all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                        const AllReduceOptions& options) const {
  all_reduce_coalesced_async(tensors, options).wait();
}

Work ProcessGroup::all_reduce_coalesced_async(const std::vector<at::Tensor>& tensors,
                                              const AllReduceOptions& options) const {
  constexpr std::string_view kCall = "all_reduce_coalesced";
  for (const at::Tensor& tensor : tensors) {
    const DType dtype = check_tensor(*communicator_, kCall, kInPlace, tensor);
    check_reduce_op(*communicator_, kCall, dtype, options.op.op());
    check_contiguous(*communicator_, kCall, kOutput, tensor);
  }
  std::vector<Ready> ready;
  for (const at::Tensor& tensor : tensors) {
    const DType dtype = *to_dtype(tensor.scalar_type());
    const Bytes bytes = bytes_of(tensor);
    ready.push_back(
        {comparing(tensor, Collective::all_reduce(bytes, bytes, dtype, options.op)), tensor, {}});
  }
  return issue_all(*communicator_, ready, options.timeout);
}

void ProcessGroup::all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                                    const std::vector<at::Tensor>& inputs,
                                                    const AllGatherOptions& options) const {
  all_gather_into_tensor_coalesced_async(outputs, inputs, options).wait();
}

Work ProcessGroup::all_gather_into_tensor_coalesced_async(const std::vector<at::Tensor>& outputs,
                                                          const std::vector<at::Tensor>& inputs,
                                                          const AllGatherOptions& options) const {
  return issue_all(*communicator_,
                   ready_pairs(*communicator_, "all_gather_into_tensor_coalesced", outputs, inputs,
                               std::nullopt),
                   options.timeout);
}

void ProcessGroup::reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                                   const std::vector<at::Tensor>& inputs,
                                                   const ReduceScatterOptions& options) const {
  reduce_scatter_tensor_coalesced_async(outputs, inputs, options).wait();
}

Work ProcessGroup::reduce_scatter_tensor_coalesced_async(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const ReduceScatterOptions& options) const {
  return issue_all(
      *communicator_,
      ready_pairs(*communicator_, "reduce_scatter_tensor_coalesced", outputs, inputs, options.op),
      options.timeout);
}

void ProcessGroup::batch_send_recv(const std::vector<P2POp>& ops,
                                   const BatchOptions& options) const {
  batch_send_recv_async(ops, options).wait();
}

Work ProcessGroup::batch_send_recv_async(const std::vector<P2POp>& ops,
                                         const BatchOptions& options) const {
  for (const P2POp& op : ops) check_message(*communicator_, op);
  std::vector<Work> works;
  for (const P2POp& op : ops) {
    const SendOptions message{.tag = op.tag, .timeout = options.timeout};
    works.push_back(op.kind == P2POp::Kind::kSend ? send_async(op.tensor, op.peer, message)
                                                  : recv_async(op.tensor, op.peer, message));
  }
  return all_of(std::move(works));
}

}  // namespace cadre
