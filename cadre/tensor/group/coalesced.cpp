// The calls of a ProcessGroup that issue several operations at once.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/held_memory.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/operands/tensor_checks.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {
namespace {

// The operations of one coalesced call, checked but not issued yet, and the memory that they use.
struct Coalesced {
  explicit Coalesced(const GroupCall& of) : call(of) {}

  // `written` is the output of the collective, `read` its input if that is another tensor. Throws
  // if the tensors are on another device than the earlier ones.
  void add(Collective collective, const at::Tensor& written, const at::Tensor& read = {}) {
    if (!first.defined()) first = written;
    place(call, collective, {&first, &written, &read});
    collectives.push_back(std::move(collective));
    kept.push_back(hold_memory(written));
    if (read.defined()) kept.push_back(hold_memory(read));
  }

  const GroupCall& call;
  at::Tensor first = {};
  std::vector<Collective> collectives = {};
  std::vector<std::shared_ptr<const void>> kept = {};
};

Work issue_together(Coalesced coalesced) {
  const GroupCall& call = coalesced.call;
  CollectiveOptions options = call.options();
  options.keep_alive = std::make_shared<const decltype(coalesced.kept)>(std::move(coalesced.kept));
  return call.group.issue(coalesced.collectives, options);
}

void check_list_length(const GroupCall& call, size_t length) {
  if (length > 0) return;
  refuse_tensor(call.group, call.name,
                "the list of tensors is empty; pass one tensor at least, and as many on all ranks");
}

void check_same_length(const GroupCall& call, const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs) {
  if (outputs.size() == inputs.size()) return;
  refuse_tensor(call.group, call.name,
                format("there are {} outputs for {} inputs; pass one for each", outputs.size(),
                       inputs.size()));
}

// Checks the pairs (outputs[i], inputs[i]): for a reduce_scatter if `op` is given, otherwise for an
// all_gather.
Coalesced checked_pairs(const GroupCall& call, const std::vector<at::Tensor>& outputs,
                        const std::vector<at::Tensor>& inputs, std::optional<Reduction> op) {
  check_same_length(call, outputs, inputs);
  check_list_length(call, inputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const DType dtype =
        check_pair(call.group, call.name, outputs[i], inputs[i], /*output_is_large=*/!op);
    if (op) check_reduce_op(call.group, call.name, dtype, op->op());
  }
  check_entries_apart(call.group, call.name, {&outputs, &inputs});
  Coalesced coalesced(call);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const DType dtype = *to_dtype(inputs[i].scalar_type());
    const ConstBytes in = const_bytes_of(inputs[i]);
    const Bytes out = bytes_of(outputs[i]);
    coalesced.add(op ? comparing(outputs[i], Collective::reduce_scatter(in, out, dtype, *op))
                     : comparing(inputs[i], Collective::all_gather(in, out, dtype)),
                  outputs[i], inputs[i]);
  }
  return coalesced;
}

Coalesced checked_in_place(const GroupCall& call, const std::vector<at::Tensor>& tensors,
                           Reduction op) {
  check_list_length(call, tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
    check_reduce_op(call.group, call.name, dtype, op.op());
    check_contiguous(call.group, call.name, kOutput, tensor);
  }
  check_entries_apart(call.group, call.name, {&tensors});
  Coalesced coalesced(call);
  for (const at::Tensor& tensor : tensors) {
    const DType dtype = *to_dtype(tensor.scalar_type());
    const Bytes bytes = bytes_of(tensor);
    coalesced.add(comparing(tensor, Collective::all_reduce(bytes, bytes, dtype, op)), tensor);
  }
  return coalesced;
}

}  // namespace

void ProcessGroup::all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                        const AllReduceOptions& options) const {
  const GroupCall call(communicator_, "all_reduce_coalesced", options.timeout);
  issue_together(checked_in_place(call, tensors, options.op)).wait();
}

Work ProcessGroup::all_reduce_coalesced_async(const std::vector<at::Tensor>& tensors,
                                              const AllReduceOptions& options) const {
  const GroupCall call(communicator_, "all_reduce_coalesced_async", options.timeout);
  return issue_together(checked_in_place(call, tensors, options.op));
}

void ProcessGroup::all_gather_coalesced(const std::vector<at::Tensor>& outputs,
                                        const std::vector<at::Tensor>& inputs,
                                        const AllGatherOptions& options) const {
  const GroupCall call(communicator_, "all_gather_coalesced", options.timeout);
  issue_together(checked_pairs(call, outputs, inputs, std::nullopt)).wait();
}

Work ProcessGroup::all_gather_coalesced_async(const std::vector<at::Tensor>& outputs,
                                              const std::vector<at::Tensor>& inputs,
                                              const AllGatherOptions& options) const {
  const GroupCall call(communicator_, "all_gather_coalesced_async", options.timeout);
  return issue_together(checked_pairs(call, outputs, inputs, std::nullopt));
}

void ProcessGroup::reduce_scatter_coalesced(const std::vector<at::Tensor>& outputs,
                                            const std::vector<at::Tensor>& inputs,
                                            const ReduceScatterOptions& options) const {
  const GroupCall call(communicator_, "reduce_scatter_coalesced", options.timeout);
  issue_together(checked_pairs(call, outputs, inputs, options.op)).wait();
}

Work ProcessGroup::reduce_scatter_coalesced_async(const std::vector<at::Tensor>& outputs,
                                                  const std::vector<at::Tensor>& inputs,
                                                  const ReduceScatterOptions& options) const {
  const GroupCall call(communicator_, "reduce_scatter_coalesced_async", options.timeout);
  return issue_together(checked_pairs(call, outputs, inputs, options.op));
}

}  // namespace cadre
