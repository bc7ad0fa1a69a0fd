#include "cadre/group/process_group.h"

#include <ATen/ops/zeros.h>

#include <string_view>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/group/dtype.h"
#include "cadre/group/mapped_parts.h"
#include "cadre/group/operands.h"
#include "cadre/group/tensor_checks.h"

namespace cadre {
namespace {

// Runs `operation` on the tensor's memory, or on a packed copy that is copied back.
template <typename Operation>
void run_packed(const Communicator& communicator, std::string_view name, const at::Tensor& tensor,
                Operation operation) {
  if (tensor.is_contiguous()) {
    operation(tensor);
    return;
  }
  check_elements_apart(communicator, name, tensor);
  const at::Tensor packed = tensor.variable_data().contiguous();
  operation(packed);
  tensor.variable_data().copy_(packed);
  mark_changed(tensor);
}

Collective gather_of(const Communicator& communicator, std::string_view call,
                     const at::Tensor& output, const at::Tensor& input) {
  const DType dtype = check_pair(communicator, call, output, input, /*output_is_large=*/true);
  return comparing(input, Collective::all_gather(const_bytes_of(input), bytes_of(output), dtype));
}

Collective gather_of(const Communicator& communicator, std::string_view call,
                     const at::Tensor& output, const at::Tensor& input, Rank root) {
  const DType dtype =
      check_rooted(communicator, call, root, output, input, /*output_is_large=*/true);
  const Bytes out = communicator.rank() == root ? bytes_of(output) : Bytes();
  return comparing(input, Collective::gather(const_bytes_of(input), out, dtype, root));
}

Collective scatter_of(const Communicator& communicator, std::string_view call,
                      const at::Tensor& output, const at::Tensor& input, Reduction op) {
  const DType dtype = check_pair(communicator, call, output, input, /*output_is_large=*/false);
  check_reduce_op(communicator, call, dtype, op.op());
  return comparing(output,
                   Collective::reduce_scatter(const_bytes_of(input), bytes_of(output), dtype, op));
}

Collective scatter_of(const Communicator& communicator, std::string_view call,
                      const at::Tensor& output, const at::Tensor& input, Rank root) {
  const DType dtype =
      check_rooted(communicator, call, root, output, input, /*output_is_large=*/false);
  const ConstBytes in = communicator.rank() == root ? const_bytes_of(input) : ConstBytes();
  return comparing(output, Collective::scatter(in, bytes_of(output), dtype, root));
}

Collective exchange_of(const Communicator& communicator, std::string_view call,
                       const at::Tensor& output, const at::Tensor& input,
                       const AllToAllSingleOptions& options) {
  Exchange exchange = check_exchange(communicator, call, output, input, options);
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
  return communicator_->rank();
}

int ProcessGroup::world_size() const {
  return communicator_->world_size();
}

const std::string& ProcessGroup::name() const {
  return communicator_->name();
}

Communicator& ProcessGroup::communicator() const {
  return *communicator_;
}

void ProcessGroup::all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "all_reduce", kInPlace, tensor);
  check_reduce_op(*communicator_, "all_reduce", dtype, options.op.op());
  run_packed(*communicator_, "all_reduce", tensor, [&](const at::Tensor& data) {
    const Bytes bytes = bytes_of(data);
    communicator_->run(comparing(tensor, Collective::all_reduce(bytes, bytes, dtype, options.op)),
                       blocking(*communicator_, options.timeout, data));
  });
}

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor,
                                    const AllReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "all_reduce_async", kInPlace, tensor);
  check_reduce_op(*communicator_, "all_reduce_async", dtype, options.op.op());
  check_contiguous(*communicator_, "all_reduce_async", kInPlace, tensor);
  const Bytes bytes = bytes_of(tensor);
  return communicator_->issue(
      comparing(tensor, Collective::all_reduce(bytes, bytes, dtype, options.op)),
      keeping(deadline_of(*communicator_, options.timeout), tensor));
}

void ProcessGroup::broadcast(const at::Tensor& tensor, const BroadcastOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "broadcast", kInPlace, tensor);
  run_packed(*communicator_, "broadcast", tensor, [&](const at::Tensor& data) {
    communicator_->run(
        comparing(tensor, Collective::broadcast(bytes_of(data), dtype, options.root)),
        blocking(*communicator_, options.timeout, data));
  });
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor,
                                   const BroadcastOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "broadcast_async", kInPlace, tensor);
  check_contiguous(*communicator_, "broadcast_async", kInPlace, tensor);
  return communicator_->issue(
      comparing(tensor, Collective::broadcast(bytes_of(tensor), dtype, options.root)),
      keeping(deadline_of(*communicator_, options.timeout), tensor));
}

void ProcessGroup::all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                                          const AllGatherOptions& options) const {
  communicator_->run(gather_of(*communicator_, "all_gather_into_tensor", output, input),
                     blocking(*communicator_, options.timeout, output, input));
}

Work ProcessGroup::all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                                const AllGatherOptions& options) const {
  return communicator_->issue(
      gather_of(*communicator_, "all_gather_into_tensor_async", output, input),
      keeping(deadline_of(*communicator_, options.timeout), output, input));
}

void ProcessGroup::reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                                         const ReduceScatterOptions& options) const {
  communicator_->run(scatter_of(*communicator_, "reduce_scatter_tensor", output, input, options.op),
                     blocking(*communicator_, options.timeout, output, input));
}

Work ProcessGroup::reduce_scatter_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                               const ReduceScatterOptions& options) const {
  return communicator_->issue(
      scatter_of(*communicator_, "reduce_scatter_tensor_async", output, input, options.op),
      keeping(deadline_of(*communicator_, options.timeout), output, input));
}

void ProcessGroup::reduce(const at::Tensor& tensor, const ReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "reduce", kInPlace, tensor);
  check_reduce_op(*communicator_, "reduce", dtype, options.op.op());
  const auto run = [&](const at::Tensor& data, Bytes out) {
    communicator_->run(comparing(tensor, Collective::reduce(const_bytes_of(data), out, dtype,
                                                            options.op, options.root)),
                       blocking(*communicator_, options.timeout, data));
  };
  if (rank() != options.root) {
    run(tensor.detach().contiguous(), {});
    return;
  }
  run_packed(*communicator_, "reduce", tensor,
             [&](const at::Tensor& data) { run(data, bytes_of(data)); });
}

Work ProcessGroup::reduce_async(const at::Tensor& tensor, const ReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "reduce_async", kInPlace, tensor);
  check_reduce_op(*communicator_, "reduce_async", dtype, options.op.op());
  check_contiguous(*communicator_, "reduce_async", kInPlace, tensor);
  const Bytes out = rank() == options.root ? bytes_of(tensor) : Bytes();
  return communicator_->issue(
      comparing(tensor,
                Collective::reduce(const_bytes_of(tensor), out, dtype, options.op, options.root)),
      keeping(deadline_of(*communicator_, options.timeout), tensor));
}

void ProcessGroup::gather(const at::Tensor& output, const at::Tensor& input,
                          const GatherOptions& options) const {
  communicator_->run(gather_of(*communicator_, "gather", output, input, options.root),
                     blocking(*communicator_, options.timeout, output, input));
}

Work ProcessGroup::gather_async(const at::Tensor& output, const at::Tensor& input,
                                const GatherOptions& options) const {
  return communicator_->issue(
      gather_of(*communicator_, "gather_async", output, input, options.root),
      keeping(deadline_of(*communicator_, options.timeout), output, input));
}

void ProcessGroup::scatter(const at::Tensor& output, const at::Tensor& input,
                           const ScatterOptions& options) const {
  communicator_->run(scatter_of(*communicator_, "scatter", output, input, options.root),
                     blocking(*communicator_, options.timeout, output, input));
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const at::Tensor& input,
                                 const ScatterOptions& options) const {
  return communicator_->issue(
      scatter_of(*communicator_, "scatter_async", output, input, options.root),
      keeping(deadline_of(*communicator_, options.timeout), output, input));
}

void ProcessGroup::all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                     const AllToAllSingleOptions& options) const {
  communicator_->run(exchange_of(*communicator_, "all_to_all_single", output, input, options),
                     blocking(*communicator_, options.timeout, output, input));
}

Work ProcessGroup::all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                                           const AllToAllSingleOptions& options) const {
  return communicator_->issue(
      exchange_of(*communicator_, "all_to_all_single_async", output, input, options),
      keeping(deadline_of(*communicator_, options.timeout), output, input));
}

void ProcessGroup::barrier(const BarrierOptions& options) const {
  communicator_->barrier({.deadline = deadline_of(*communicator_, options.timeout)});
}

Work ProcessGroup::barrier_async(const BarrierOptions& options) const {
  return communicator_->barrier_async({.deadline = deadline_of(*communicator_, options.timeout)});
}

void ProcessGroup::send(const at::Tensor& tensor, Rank destination,
                        const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "send", kInput, tensor);
  const at::Tensor packed = tensor.detach().contiguous();
  communicator_->send(const_bytes_of(packed), dtype, destination, options.tag,
                      {.deadline = deadline_of(*communicator_, options.timeout)});
}

Work ProcessGroup::send_async(const at::Tensor& tensor, Rank destination,
                              const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "send_async", kInput, tensor);
  const at::Tensor packed = tensor.detach().contiguous();
  return communicator_->send_async(const_bytes_of(packed), dtype, destination, options.tag,
                                   keeping(deadline_of(*communicator_, options.timeout), packed));
}

void ProcessGroup::recv(const at::Tensor& tensor, Rank source, const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "recv", kInPlace, tensor);
  run_packed(*communicator_, "recv", tensor, [&](const at::Tensor& data) {
    communicator_->recv(bytes_of(data), dtype, source, options.tag,
                        {.deadline = deadline_of(*communicator_, options.timeout)});
  });
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, Rank source,
                              const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "recv_async", kInPlace, tensor);
  check_contiguous(*communicator_, "recv_async", kInPlace, tensor);
  return communicator_->recv_async(bytes_of(tensor), dtype, source, options.tag,
                                   keeping(deadline_of(*communicator_, options.timeout), tensor));
}

int ProcessGroup::recv_from_any(const at::Tensor& tensor, const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "recv_from_any", kInPlace, tensor);
  Rank source = 0;
  run_packed(*communicator_, "recv_from_any", tensor, [&](const at::Tensor& data) {
    source =
        communicator_->recv_from_any(bytes_of(data), dtype, options.tag,
                                     {.deadline = deadline_of(*communicator_, options.timeout)});
  });
  return source;
}

at::Tensor ProcessGroup::empty_symmetric(int64_t numel, at::ScalarType type) const {
  const std::optional<DType> dtype = to_dtype(type);
  if (!dtype || numel < 0) {
    refuse_tensor(*communicator_, "empty_symmetric",
                  format("{} elements of {} cannot be exchanged; pass a count >= 0 and one of {}",
                         numel, c10::toString(type), dtype_names()));
  }
  const size_t num_bytes = static_cast<size_t>(numel) * size_of(*dtype);
  if (num_bytes == 0) return at::zeros({0}, at::TensorOptions().dtype(type));
  const auto buffer = communicator_->allocate_symmetric(num_bytes);
  return tensor_on(buffer, buffer->local().first(num_bytes), type);
}

std::optional<MappedParts> ProcessGroup::map_parts(int64_t numel, at::ScalarType dtype) const {
  return MappedParts::allocate(*this, numel, dtype);
}

void ProcessGroup::abort(const std::string& reason) const {
  communicator_->abort(reason);
}

void ProcessGroup::close(Duration timeout) const {
  communicator_->close(communicator_->system().deadline_in(timeout));
}

}  // namespace cadre
