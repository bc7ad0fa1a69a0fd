// The operations of a ProcessGroup on lists of tensors, one for each rank.
//
// The tensors of a list are copied one behind the other into one packed tensor, on which the flat
// collective runs.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/group_work.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/operands/tensor_checks.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {
namespace {

// A collective on packed tensors. When it is done, `finish` copies the result to the caller's
// tensors.
struct PackedCall {
  Collective collective;
  at::Tensor in = {};
  at::Tensor out = {};
  std::function<void()> finish = [] {};
};

void run_packed(const GroupCall& call, const PackedCall& packed) {
  run_on(call, packed.collective, packed.in, packed.out);
  packed.finish();
}

Work issue_packed(const GroupCall& call, PackedCall packed) {
  const at::Tensor& any = packed.out.defined() ? packed.out : packed.in;
  return finish_after(issue_on(call, packed.collective, packed.in, packed.out),
                      std::move(packed.finish), any.device());
}

std::vector<uint64_t> counts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<uint64_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(static_cast<uint64_t>(tensor.numel()));
  return counts;
}

bool are_equal(const std::vector<uint64_t>& counts) {
  return std::all_of(counts.begin(), counts.end(),
                     [&](uint64_t count) { return count == counts.front(); });
}

void check_even(const Communicator& communicator, std::string_view call, std::string_view role,
                const std::vector<at::Tensor>& tensors) {
  if (are_equal(counts_of(tensors))) return;
  std::string shapes;
  for (const at::Tensor& tensor : tensors) shapes += shape_of(tensor) + " ";
  refuse_tensor(communicator, call,
                format("{}s of the list differ in size: {}; in this operation all must have the "
                       "same number of elements, so pad them or use all_to_all",
                       role, shapes));
}

at::Tensor packed(const at::Tensor& tensor) {
  return tensor.variable_data().contiguous();
}

at::Tensor packed(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.variable_data().reshape({-1}));
  return at::cat(flat);
}

// Returns a packed tensor with room for all outputs, and marks the outputs as changed.
at::Tensor room_for(const std::vector<at::Tensor>& outputs) {
  int64_t numel = 0;
  for (const at::Tensor& output : outputs) {
    mark_changed(output);
    numel += output.numel();
  }
  return at::empty({numel}, outputs.front().options().requires_grad(false));
}

std::function<void()> unpacking(const at::Tensor& from, const std::vector<at::Tensor>& outputs) {
  return [from, outputs] {
    int64_t offset = 0;
    for (const at::Tensor& output : outputs) {
      output.variable_data().copy_(from.narrow(0, offset, output.numel()).view(output.sizes()));
      offset += output.numel();
    }
  };
}

// Makes the collective write to `output`, through a packed tensor if `output` is not contiguous.
void write_to(PackedCall& call, const at::Tensor& output) {
  call.out = output;
  if (!output.is_contiguous()) {
    mark_changed(output);
    call.out = at::empty_like(output.variable_data(), at::MemoryFormat::Contiguous);
    call.finish = [from = call.out, output] { output.variable_data().copy_(from); };
  }
  call.collective.out = bytes_of(call.out);
}

// Returns whether the tensors have one shape, which the ranks then compare. If not, they compare
// only the number of elements.
bool have_one_shape(const std::vector<at::Tensor>& tensors) {
  return std::ranges::all_of(
      tensors, [&](const at::Tensor& t) { return t.sizes() == tensors.front().sizes(); });
}

PackedCall packed_gather(const GroupCall& call, const std::vector<at::Tensor>& outputs,
                         const at::Tensor& input) {
  const DType dtype = check_list(call.group, call.name, kOutput, outputs);
  check_beside_list(call.group, call.name, kInput, input, outputs);
  PackedCall packed_call{.in = packed(input), .out = room_for(outputs)};
  packed_call.finish = unpacking(packed_call.out, outputs);
  const ConstBytes in = const_bytes_of(packed_call.in);
  const Bytes out = bytes_of(packed_call.out);
  std::vector<uint64_t> counts = counts_of(outputs);
  if (!are_equal(counts)) {
    packed_call.collective = Collective::all_gather_v(in, out, dtype, std::move(counts));
    return packed_call;
  }
  packed_call.collective = Collective::all_gather(in, out, dtype);
  if (have_one_shape(outputs)) {
    packed_call.collective = comparing(input, std::move(packed_call.collective));
  }
  return packed_call;
}

PackedCall packed_gather(const GroupCall& call, const std::vector<at::Tensor>& outputs,
                         const at::Tensor& input, Rank root) {
  const bool is_root = call.group.rank() == root;
  if (is_root) {
    check_list(call.group, call.name, kOutput, outputs);
    check_even(call.group, call.name, kOutput, outputs);
  }
  const DType dtype = check_beside_list(call.group, call.name, kInput, input,
                                        is_root ? outputs : std::vector<at::Tensor>());
  PackedCall packed_call{.in = packed(input)};
  if (is_root) {
    packed_call.out = room_for(outputs);
    packed_call.finish = unpacking(packed_call.out, outputs);
  }
  packed_call.collective = comparing(
      input, Collective::gather(const_bytes_of(packed_call.in),
                                is_root ? bytes_of(packed_call.out) : Bytes(), dtype, root));
  return packed_call;
}

PackedCall packed_reduce_scatter(const GroupCall& call, const at::Tensor& output,
                                 const std::vector<at::Tensor>& inputs, Reduction op) {
  const DType dtype = check_list(call.group, call.name, kInput, inputs);
  check_beside_list(call.group, call.name, kOutput, output, inputs);
  check_reduce_op(call.group, call.name, dtype, op.op());
  PackedCall packed_call{.in = packed(inputs)};
  const ConstBytes in = const_bytes_of(packed_call.in);
  std::vector<uint64_t> counts = counts_of(inputs);
  if (!are_equal(counts)) {
    packed_call.collective = Collective::reduce_scatter_v(in, {}, dtype, op, std::move(counts));
  } else {
    packed_call.collective = Collective::reduce_scatter(in, {}, dtype, op);
    if (have_one_shape(inputs)) {
      packed_call.collective = comparing(output, std::move(packed_call.collective));
    }
  }
  write_to(packed_call, output);
  return packed_call;
}

PackedCall packed_scatter(const GroupCall& call, const at::Tensor& output,
                          const std::vector<at::Tensor>& inputs, Rank root) {
  const bool is_root = call.group.rank() == root;
  if (is_root) {
    check_list(call.group, call.name, kInput, inputs);
    check_even(call.group, call.name, kInput, inputs);
  }
  const DType dtype = check_beside_list(call.group, call.name, kOutput, output,
                                        is_root ? inputs : std::vector<at::Tensor>());
  PackedCall packed_call;
  if (is_root) packed_call.in = packed(inputs);
  const ConstBytes in = is_root ? const_bytes_of(packed_call.in) : ConstBytes();
  packed_call.collective = comparing(output, Collective::scatter(in, {}, dtype, root));
  write_to(packed_call, output);
  return packed_call;
}

PackedCall packed_exchange(const GroupCall& call, const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) {
  const DType dtype = check_list(call.group, call.name, kInput, inputs);
  check_list(call.group, call.name, kOutput, outputs);
  check_beside_list(call.group, call.name, kOutput, outputs[static_cast<size_t>(call.group.rank())],
                    inputs);
  PackedCall packed_call{.in = packed(inputs), .out = room_for(outputs)};
  packed_call.finish = unpacking(packed_call.out, outputs);
  packed_call.collective =
      Collective::all_to_all_v(const_bytes_of(packed_call.in), bytes_of(packed_call.out), dtype,
                               {.input = counts_of(inputs), .output = counts_of(outputs)});
  return packed_call;
}

}  // namespace

void ProcessGroup::all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                              const AllGatherOptions& options) const {
  const GroupCall call(communicator_, "all_gather", options.timeout);
  run_packed(call, packed_gather(call, outputs, input));
}

Work ProcessGroup::all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                    const AllGatherOptions& options) const {
  const GroupCall call(communicator_, "all_gather_async", options.timeout);
  return issue_packed(call, packed_gather(call, outputs, input));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                  const ReduceScatterOptions& options) const {
  const GroupCall call(communicator_, "reduce_scatter", options.timeout);
  run_packed(call, packed_reduce_scatter(call, output, inputs, options.op));
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output,
                                        const std::vector<at::Tensor>& inputs,
                                        const ReduceScatterOptions& options) const {
  const GroupCall call(communicator_, "reduce_scatter_async", options.timeout);
  return issue_packed(call, packed_reduce_scatter(call, output, inputs, options.op));
}

void ProcessGroup::gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                          const GatherOptions& options) const {
  const GroupCall call(communicator_, "gather", options.timeout);
  run_packed(call, packed_gather(call, outputs, input, options.root));
}

Work ProcessGroup::gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                const GatherOptions& options) const {
  const GroupCall call(communicator_, "gather_async", options.timeout);
  return issue_packed(call, packed_gather(call, outputs, input, options.root));
}

void ProcessGroup::scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                           const ScatterOptions& options) const {
  const GroupCall call(communicator_, "scatter", options.timeout);
  run_packed(call, packed_scatter(call, output, inputs, options.root));
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                 const ScatterOptions& options) const {
  const GroupCall call(communicator_, "scatter_async", options.timeout);
  return issue_packed(call, packed_scatter(call, output, inputs, options.root));
}

void ProcessGroup::all_to_all(const std::vector<at::Tensor>& outputs,
                              const std::vector<at::Tensor>& inputs,
                              const AllToAllListOptions& options) const {
  const GroupCall call(communicator_, "all_to_all", options.timeout);
  run_packed(call, packed_exchange(call, outputs, inputs));
}

Work ProcessGroup::all_to_all_async(const std::vector<at::Tensor>& outputs,
                                    const std::vector<at::Tensor>& inputs,
                                    const AllToAllListOptions& options) const {
  const GroupCall call(communicator_, "all_to_all_async", options.timeout);
  return issue_packed(call, packed_exchange(call, outputs, inputs));
}

}  // namespace cadre
