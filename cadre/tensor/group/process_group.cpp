#include "cadre/tensor/group/process_group.h"

#include <ATen/ops/zeros.h>

#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/checks.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/operands/tensor_checks.h"

namespace cadre {
namespace {

Collective gather_of(const GroupCall& call, const at::Tensor& output, const at::Tensor& input) {
  const DType dtype = check_pair(call.group, call.name, output, input, /*output_is_large=*/true);
  return comparing(input, Collective::all_gather(const_bytes_of(input), bytes_of(output), dtype));
}

Collective gather_of(const GroupCall& call, const at::Tensor& output, const at::Tensor& input,
                     Rank root) {
  const DType dtype =
      check_rooted(call.group, call.name, root, output, input, /*output_is_large=*/true);
  const Bytes out = call.group.rank() == root ? bytes_of(output) : Bytes();
  return comparing(input, Collective::gather(const_bytes_of(input), out, dtype, root));
}

Collective scatter_of(const GroupCall& call, const at::Tensor& output, const at::Tensor& input,
                      Reduction op) {
  const DType dtype = check_pair(call.group, call.name, output, input, /*output_is_large=*/false);
  check_reduce_op(call.group, call.name, dtype, op.op());
  return comparing(output,
                   Collective::reduce_scatter(const_bytes_of(input), bytes_of(output), dtype, op));
}

Collective scatter_of(const GroupCall& call, const at::Tensor& output, const at::Tensor& input,
                      Rank root) {
  const DType dtype =
      check_rooted(call.group, call.name, root, output, input, /*output_is_large=*/false);
  const ConstBytes in = call.group.rank() == root ? const_bytes_of(input) : ConstBytes();
  return comparing(output, Collective::scatter(in, bytes_of(output), dtype, root));
}

// Returns the tensor that only the root of a gather or scatter uses; an undefined one on other
// ranks, where the program may pass any.
at::Tensor used_at_root(const GroupCall& call, Rank root, const at::Tensor& tensor) {
  return call.group.rank() == root ? tensor : at::Tensor();
}

Collective exchange_of(const GroupCall& call, const at::Tensor& output, const at::Tensor& input,
                       const AllToAllOptions& options) {
  Exchange exchange =
      check_exchange(call.group, call.name, output, input,
                     {.output = options.output_split_sizes, .input = options.input_split_sizes});
  const ConstBytes in = const_bytes_of(input);
  const Bytes out = bytes_of(output);
  if (exchange.input_counts.empty()) {
    return comparing(input, Collective::all_to_all(in, out, exchange.dtype));
  }
  return Collective::all_to_all_v(
      in, out, exchange.dtype,
      {.input = std::move(exchange.input_counts), .output = std::move(exchange.output_counts)});
}

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {
  if (!communicator_) {
    throw Error(ErrorCode::kInvalidArgument, "ProcessGroup: the communicator is null");
  }
}

int ProcessGroup::rank() const {
  return group_behind(communicator_, "rank").rank();
}

int ProcessGroup::world_size() const {
  return group_behind(communicator_, "world_size").world_size();
}

const std::string& ProcessGroup::name() const {
  return group_behind(communicator_, "name").name();
}

Communicator& ProcessGroup::communicator() const {
  return group_behind(communicator_, "communicator");
}

std::optional<c10::Device> ProcessGroup::device() const {
  const std::optional<Device> device = group_behind(communicator_, "device").device();
  return device ? std::optional(device::to_c10(*device)) : std::nullopt;
}

std::optional<Error> ProcessGroup::error() const {
  return group_behind(communicator_, "error").error();
}

void ProcessGroup::all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) const {
  const GroupCall call(communicator_, "all_reduce", options.timeout);
  const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
  check_reduce_op(call.group, call.name, dtype, options.op.op());
  run_packed(call, tensor, [&](const at::Tensor& data) {
    const Bytes bytes = bytes_of(data);
    run_on(call, comparing(tensor, Collective::all_reduce(bytes, bytes, dtype, options.op)), data);
  });
}

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor,
                                    const AllReduceOptions& options) const {
  const GroupCall call(communicator_, "all_reduce_async", options.timeout);
  const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
  check_reduce_op(call.group, call.name, dtype, options.op.op());
  check_contiguous(call.group, call.name, kInPlace, tensor);
  const Bytes bytes = bytes_of(tensor);
  return issue_on(call, comparing(tensor, Collective::all_reduce(bytes, bytes, dtype, options.op)),
                  tensor);
}

void ProcessGroup::broadcast(const at::Tensor& tensor, const BroadcastOptions& options) const {
  const GroupCall call(communicator_, "broadcast", options.timeout);
  const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
  run_packed(call, tensor, [&](const at::Tensor& data) {
    run_on(call, comparing(tensor, Collective::broadcast(bytes_of(data), dtype, options.root)),
           data);
  });
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor,
                                   const BroadcastOptions& options) const {
  const GroupCall call(communicator_, "broadcast_async", options.timeout);
  const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
  check_contiguous(call.group, call.name, kInPlace, tensor);
  return issue_on(call,
                  comparing(tensor, Collective::broadcast(bytes_of(tensor), dtype, options.root)),
                  tensor);
}

void ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input,
                              const AllGatherOptions& options) const {
  const GroupCall call(communicator_, "all_gather", options.timeout);
  run_on(call, gather_of(call, output, input), output, input);
}

Work ProcessGroup::all_gather_async(const at::Tensor& output, const at::Tensor& input,
                                    const AllGatherOptions& options) const {
  const GroupCall call(communicator_, "all_gather_async", options.timeout);
  return issue_on(call, gather_of(call, output, input), output, input);
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  const ReduceScatterOptions& options) const {
  const GroupCall call(communicator_, "reduce_scatter", options.timeout);
  run_on(call, scatter_of(call, output, input, options.op), output, input);
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                        const ReduceScatterOptions& options) const {
  const GroupCall call(communicator_, "reduce_scatter_async", options.timeout);
  return issue_on(call, scatter_of(call, output, input, options.op), output, input);
}

void ProcessGroup::reduce(const at::Tensor& tensor, const ReduceOptions& options) const {
  const GroupCall call(communicator_, "reduce", options.timeout);
  const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
  check_reduce_op(call.group, call.name, dtype, options.op.op());
  const auto run = [&](const at::Tensor& data, Bytes out) {
    run_on(call,
           comparing(tensor, Collective::reduce(const_bytes_of(data), out, dtype, options.op,
                                                options.root)),
           data);
  };
  if (call.group.rank() != options.root) {
    run(tensor.detach().contiguous(), {});
    return;
  }
  run_packed(call, tensor, [&](const at::Tensor& data) { run(data, bytes_of(data)); });
}

Work ProcessGroup::reduce_async(const at::Tensor& tensor, const ReduceOptions& options) const {
  const GroupCall call(communicator_, "reduce_async", options.timeout);
  const DType dtype = check_tensor(call.group, call.name, kInPlace, tensor);
  check_reduce_op(call.group, call.name, dtype, options.op.op());
  check_contiguous(call.group, call.name, kInPlace, tensor);
  const Bytes out = call.group.rank() == options.root ? bytes_of(tensor) : Bytes();
  return issue_on(call,
                  comparing(tensor, Collective::reduce(const_bytes_of(tensor), out, dtype,
                                                       options.op, options.root)),
                  tensor);
}

void ProcessGroup::gather(const at::Tensor& output, const at::Tensor& input,
                          const GatherOptions& options) const {
  const GroupCall call(communicator_, "gather", options.timeout);
  run_on(call, gather_of(call, output, input, options.root),
         used_at_root(call, options.root, output), input);
}

Work ProcessGroup::gather_async(const at::Tensor& output, const at::Tensor& input,
                                const GatherOptions& options) const {
  const GroupCall call(communicator_, "gather_async", options.timeout);
  return issue_on(call, gather_of(call, output, input, options.root),
                  used_at_root(call, options.root, output), input);
}

void ProcessGroup::scatter(const at::Tensor& output, const at::Tensor& input,
                           const ScatterOptions& options) const {
  const GroupCall call(communicator_, "scatter", options.timeout);
  run_on(call, scatter_of(call, output, input, options.root), output,
         used_at_root(call, options.root, input));
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const at::Tensor& input,
                                 const ScatterOptions& options) const {
  const GroupCall call(communicator_, "scatter_async", options.timeout);
  return issue_on(call, scatter_of(call, output, input, options.root), output,
                  used_at_root(call, options.root, input));
}

void ProcessGroup::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              const AllToAllOptions& options) const {
  const GroupCall call(communicator_, "all_to_all", options.timeout);
  run_on(call, exchange_of(call, output, input, options), output, input);
}

Work ProcessGroup::all_to_all_async(const at::Tensor& output, const at::Tensor& input,
                                    const AllToAllOptions& options) const {
  const GroupCall call(communicator_, "all_to_all_async", options.timeout);
  return issue_on(call, exchange_of(call, output, input, options), output, input);
}

void ProcessGroup::barrier(const BarrierOptions& options) const {
  const GroupCall call(communicator_, "barrier", options.timeout);
  call.group.barrier(call.options());
}

Work ProcessGroup::barrier_async(const BarrierOptions& options) const {
  const GroupCall call(communicator_, "barrier_async", options.timeout);
  return call.group.barrier_async(call.options());
}

void ProcessGroup::abort(const std::string& reason) const {
  group_behind(communicator_, "abort").abort(reason);
}

void ProcessGroup::close(Duration timeout) const {
  Communicator& group = group_behind(communicator_, "close");
  group.close(deadline_of(group, "close", timeout));
}

}  // namespace cadre
