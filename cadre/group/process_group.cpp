#include "cadre/group/process_group.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <span>
#include <string_view>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/group/dtype.h"
#include "cadre/group/held_memory.h"
#include "cadre/group/mapped_parts.h"
#include "cadre/group/tensor_checks.h"

namespace cadre {
namespace {

Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

ConstBytes const_bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// `compared` is the tensor whose shape must be the same on all ranks.
Collective comparing(const at::Tensor& compared, Collective collective) {
  const at::IntArrayRef sizes = compared.sizes();
  collective.shape = std::span(sizes.data(), sizes.size());
  return collective;
}

template <typename... Tensors>
CollectiveOptions keeping(std::optional<Deadline> deadline, const Tensors&... tensors) {
  using Kept = std::array<std::shared_ptr<const void>, sizeof...(Tensors)>;
  return {.deadline = deadline,
          .keep_alive = std::make_shared<const Kept>(Kept{hold_memory(tensors)...})};
}

// Runs `operation` on the tensor's memory, or on a packed copy that is copied back.
template <typename Operation>
void run_packed(const Communicator& communicator, std::string_view name, const at::Tensor& tensor,
                Operation operation) {
  if (tensor.is_contiguous()) {
    operation(tensor);
    return;
  }
  check_elements_apart(communicator, name, tensor);
  const at::NoGradGuard no_grad;
  const at::Tensor packed = tensor.detach().contiguous();
  operation(packed);
  // Unlike detach(), with a version counter of its own: a contiguous tensor's does not move either.
  tensor.variable_data().copy_(packed);
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
                       {.deadline = options.deadline});
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
      keeping(options.deadline, tensor));
}

void ProcessGroup::broadcast(const at::Tensor& tensor, const BroadcastOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "broadcast", kInPlace, tensor);
  run_packed(*communicator_, "broadcast", tensor, [&](const at::Tensor& data) {
    communicator_->run(
        comparing(tensor, Collective::broadcast(bytes_of(data), dtype, options.root)),
        {.deadline = options.deadline});
  });
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor,
                                   const BroadcastOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "broadcast_async", kInPlace, tensor);
  check_contiguous(*communicator_, "broadcast_async", kInPlace, tensor);
  return communicator_->issue(
      comparing(tensor, Collective::broadcast(bytes_of(tensor), dtype, options.root)),
      keeping(options.deadline, tensor));
}

void ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input,
                              const AllGatherOptions& options) const {
  const DType dtype = check_pair(*communicator_, "all_gather", output, input, true);
  communicator_->run(
      comparing(input, Collective::all_gather(const_bytes_of(input), bytes_of(output), dtype)),
      {.deadline = options.deadline});
}

Work ProcessGroup::all_gather_async(const at::Tensor& output, const at::Tensor& input,
                                    const AllGatherOptions& options) const {
  const DType dtype = check_pair(*communicator_, "all_gather_async", output, input, true);
  return communicator_->issue(
      comparing(input, Collective::all_gather(const_bytes_of(input), bytes_of(output), dtype)),
      keeping(options.deadline, output, input));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  const ReduceScatterOptions& options) const {
  const DType dtype = check_pair(*communicator_, "reduce_scatter", output, input, false);
  check_reduce_op(*communicator_, "reduce_scatter", dtype, options.op.op());
  communicator_->run(
      comparing(output, Collective::reduce_scatter(const_bytes_of(input), bytes_of(output), dtype,
                                                   options.op)),
      {.deadline = options.deadline});
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                        const ReduceScatterOptions& options) const {
  const DType dtype = check_pair(*communicator_, "reduce_scatter_async", output, input, false);
  check_reduce_op(*communicator_, "reduce_scatter_async", dtype, options.op.op());
  return communicator_->issue(
      comparing(output, Collective::reduce_scatter(const_bytes_of(input), bytes_of(output), dtype,
                                                   options.op)),
      keeping(options.deadline, output, input));
}

void ProcessGroup::reduce(const at::Tensor& tensor, const ReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "reduce", kInPlace, tensor);
  check_reduce_op(*communicator_, "reduce", dtype, options.op.op());
  const auto run = [&](ConstBytes in, Bytes out) {
    communicator_->run(
        comparing(tensor, Collective::reduce(in, out, dtype, options.op, options.root)),
        {.deadline = options.deadline});
  };
  if (rank() != options.root) {
    const at::Tensor data = tensor.detach().contiguous();
    run(const_bytes_of(data), {});
    return;
  }
  run_packed(*communicator_, "reduce", tensor,
             [&](const at::Tensor& data) { run(const_bytes_of(data), bytes_of(data)); });
}

Work ProcessGroup::reduce_async(const at::Tensor& tensor, const ReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "reduce_async", kInPlace, tensor);
  check_reduce_op(*communicator_, "reduce_async", dtype, options.op.op());
  check_contiguous(*communicator_, "reduce_async", kInPlace, tensor);
  const Bytes out = rank() == options.root ? bytes_of(tensor) : Bytes();
  return communicator_->issue(
      comparing(tensor,
                Collective::reduce(const_bytes_of(tensor), out, dtype, options.op, options.root)),
      keeping(options.deadline, tensor));
}

void ProcessGroup::gather(const at::Tensor& output, const at::Tensor& input,
                          const GatherOptions& options) const {
  const DType dtype =
      check_rooted(*communicator_, "gather", options.root, output, input, /*output_is_large=*/true);
  communicator_->run(
      comparing(input, Collective::gather(const_bytes_of(input),
                                          rank() == options.root ? bytes_of(output) : Bytes(),
                                          dtype, options.root)),
      {.deadline = options.deadline});
}

Work ProcessGroup::gather_async(const at::Tensor& output, const at::Tensor& input,
                                const GatherOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "gather_async", options.root, output, input,
                                   /*output_is_large=*/true);
  return communicator_->issue(
      comparing(input, Collective::gather(const_bytes_of(input),
                                          rank() == options.root ? bytes_of(output) : Bytes(),
                                          dtype, options.root)),
      keeping(options.deadline, output, input));
}

void ProcessGroup::scatter(const at::Tensor& output, const at::Tensor& input,
                           const ScatterOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "scatter", options.root, output, input,
                                   /*output_is_large=*/false);
  communicator_->run(
      comparing(output,
                Collective::scatter(rank() == options.root ? const_bytes_of(input) : ConstBytes(),
                                    bytes_of(output), dtype, options.root)),
      {.deadline = options.deadline});
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const at::Tensor& input,
                                 const ScatterOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "scatter_async", options.root, output, input,
                                   /*output_is_large=*/false);
  return communicator_->issue(
      comparing(output,
                Collective::scatter(rank() == options.root ? const_bytes_of(input) : ConstBytes(),
                                    bytes_of(output), dtype, options.root)),
      keeping(options.deadline, output, input));
}

void ProcessGroup::all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                     const AllToAllOptions& options) const {
  communicator_->run(exchange_of("all_to_all_single", output, input, options),
                     {.deadline = options.deadline});
}

Work ProcessGroup::all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                                           const AllToAllOptions& options) const {
  return communicator_->issue(exchange_of("all_to_all_single_async", output, input, options),
                              keeping(options.deadline, output, input));
}

Collective ProcessGroup::exchange_of(std::string_view call, const at::Tensor& output,
                                     const at::Tensor& input,
                                     const AllToAllOptions& options) const {
  Exchange exchange = check_exchange(*communicator_, call, output, input, options);
  const ConstBytes in = const_bytes_of(input);
  const Bytes out = bytes_of(output);
  if (exchange.input_counts.empty()) {
    return comparing(input, Collective::all_to_all(in, out, exchange.dtype));
  }
  return Collective::all_to_all_v(
      in, out, exchange.dtype,
      {.input = std::move(exchange.input_counts), .output = std::move(exchange.output_counts)});
}

void ProcessGroup::barrier(const BarrierOptions& options) const {
  communicator_->barrier({.deadline = options.deadline});
}

void ProcessGroup::send(const at::Tensor& tensor, Rank destination,
                        const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "send", kInput, tensor);
  const at::Tensor packed = tensor.detach().contiguous();
  communicator_->send(const_bytes_of(packed), dtype, destination, options.tag,
                      {.deadline = options.deadline});
}

Work ProcessGroup::send_async(const at::Tensor& tensor, Rank destination,
                              const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "send_async", kInput, tensor);
  const at::Tensor packed = tensor.detach().contiguous();
  return communicator_->send_async(const_bytes_of(packed), dtype, destination, options.tag,
                                   keeping(options.deadline, packed));
}

void ProcessGroup::recv(const at::Tensor& tensor, Rank source, const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "recv", kInPlace, tensor);
  run_packed(*communicator_, "recv", tensor, [&](const at::Tensor& data) {
    communicator_->recv(bytes_of(data), dtype, source, options.tag, {.deadline = options.deadline});
  });
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, Rank source,
                              const SendOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "recv_async", kInPlace, tensor);
  check_contiguous(*communicator_, "recv_async", kInPlace, tensor);
  return communicator_->recv_async(bytes_of(tensor), dtype, source, options.tag,
                                   keeping(options.deadline, tensor));
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
  std::shared_ptr<SymmetricBuffer> buffer = communicator_->allocate_symmetric(num_bytes);
  void* data = buffer->local().data();
  // The deleter owns the buffer: it goes with the last tensor that points into it.
  return at::from_blob(
      data, {numel}, [buffer = std::move(buffer)](void*) mutable { buffer.reset(); },
      at::TensorOptions().dtype(type));
}

std::optional<MappedParts> ProcessGroup::map_parts(int64_t numel, at::ScalarType dtype) const {
  return MappedParts::allocate(*this, numel, dtype);
}

void ProcessGroup::abort(const std::string& reason) const {
  communicator_->abort(reason);
}

void ProcessGroup::close() const {
  communicator_->close(communicator_->system().deadline_in(kDefaultCloseTimeout));
}

}  // namespace cadre
