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
CollectiveOptions comparing(const at::Tensor& compared, std::optional<Deadline> deadline) {
  const at::IntArrayRef sizes = compared.sizes();
  return {.deadline = deadline, .sizes = std::span(sizes.data(), sizes.size())};
}

template <typename... Tensors>
CollectiveOptions keeping(CollectiveOptions options, const Tensors&... tensors) {
  using Kept = std::array<std::shared_ptr<const void>, sizeof...(Tensors)>;
  options.keep_alive = std::make_shared<const Kept>(Kept{hold_memory(tensors)...});
  return options;
}

CollectiveOptions with_factor(CollectiveOptions options, std::optional<double> premul_factor) {
  options.premul_factor = premul_factor;
  return options;
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
  check_reduce_op(*communicator_, "all_reduce", dtype, options.op);
  run_packed(*communicator_, "all_reduce", tensor, [&](const at::Tensor& data) {
    communicator_->all_reduce(
        const_bytes_of(data), bytes_of(data), dtype, options.op,
        with_factor(comparing(tensor, options.deadline), options.premul_factor));
  });
}

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor,
                                    const AllReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "all_reduce_async", kInPlace, tensor);
  check_reduce_op(*communicator_, "all_reduce_async", dtype, options.op);
  check_contiguous(*communicator_, "all_reduce_async", kInPlace, tensor);
  return communicator_->all_reduce_async(
      const_bytes_of(tensor), bytes_of(tensor), dtype, options.op,
      with_factor(keeping(comparing(tensor, options.deadline), tensor), options.premul_factor));
}

void ProcessGroup::broadcast(const at::Tensor& tensor, const BroadcastOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "broadcast", kInPlace, tensor);
  run_packed(*communicator_, "broadcast", tensor, [&](const at::Tensor& data) {
    communicator_->broadcast(bytes_of(data), dtype, options.root,
                             comparing(tensor, options.deadline));
  });
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor,
                                   const BroadcastOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "broadcast_async", kInPlace, tensor);
  check_contiguous(*communicator_, "broadcast_async", kInPlace, tensor);
  return communicator_->broadcast_async(bytes_of(tensor), dtype, options.root,
                                        keeping(comparing(tensor, options.deadline), tensor));
}

void ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input,
                              const AllGatherOptions& options) const {
  const DType dtype = check_pair(*communicator_, "all_gather", output, input, true);
  communicator_->all_gather(const_bytes_of(input), bytes_of(output), dtype,
                            comparing(input, options.deadline));
}

Work ProcessGroup::all_gather_async(const at::Tensor& output, const at::Tensor& input,
                                    const AllGatherOptions& options) const {
  const DType dtype = check_pair(*communicator_, "all_gather_async", output, input, true);
  return communicator_->all_gather_async(
      const_bytes_of(input), bytes_of(output), dtype,
      keeping(comparing(input, options.deadline), output, input));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  const ReduceScatterOptions& options) const {
  const DType dtype = check_pair(*communicator_, "reduce_scatter", output, input, false);
  check_reduce_op(*communicator_, "reduce_scatter", dtype, options.op);
  communicator_->reduce_scatter(
      const_bytes_of(input), bytes_of(output), dtype, options.op,
      with_factor(comparing(output, options.deadline), options.premul_factor));
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                        const ReduceScatterOptions& options) const {
  const DType dtype = check_pair(*communicator_, "reduce_scatter_async", output, input, false);
  check_reduce_op(*communicator_, "reduce_scatter_async", dtype, options.op);
  return communicator_->reduce_scatter_async(
      const_bytes_of(input), bytes_of(output), dtype, options.op,
      with_factor(keeping(comparing(output, options.deadline), output, input),
                  options.premul_factor));
}

void ProcessGroup::reduce(const at::Tensor& tensor, const ReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "reduce", kInPlace, tensor);
  check_reduce_op(*communicator_, "reduce", dtype, options.op);
  const CollectiveOptions call =
      with_factor(comparing(tensor, options.deadline), options.premul_factor);
  if (rank() != options.root) {
    const at::Tensor data = tensor.detach().contiguous();
    communicator_->reduce(const_bytes_of(data), {}, dtype, options.op, options.root, call);
    return;
  }
  run_packed(*communicator_, "reduce", tensor, [&](const at::Tensor& data) {
    communicator_->reduce(const_bytes_of(data), bytes_of(data), dtype, options.op, options.root,
                          call);
  });
}

Work ProcessGroup::reduce_async(const at::Tensor& tensor, const ReduceOptions& options) const {
  const DType dtype = check_tensor(*communicator_, "reduce_async", kInPlace, tensor);
  check_reduce_op(*communicator_, "reduce_async", dtype, options.op);
  check_contiguous(*communicator_, "reduce_async", kInPlace, tensor);
  const Bytes out = rank() == options.root ? bytes_of(tensor) : Bytes();
  return communicator_->reduce_async(
      const_bytes_of(tensor), out, dtype, options.op, options.root,
      with_factor(keeping(comparing(tensor, options.deadline), tensor), options.premul_factor));
}

void ProcessGroup::gather(const at::Tensor& output, const at::Tensor& input,
                          const GatherOptions& options) const {
  const DType dtype =
      check_rooted(*communicator_, "gather", options.root, output, input, /*output_is_large=*/true);
  const Bytes out = rank() == options.root ? bytes_of(output) : Bytes();
  communicator_->gather(const_bytes_of(input), out, dtype, options.root,
                        comparing(input, options.deadline));
}

Work ProcessGroup::gather_async(const at::Tensor& output, const at::Tensor& input,
                                const GatherOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "gather_async", options.root, output, input,
                                   /*output_is_large=*/true);
  const Bytes out = rank() == options.root ? bytes_of(output) : Bytes();
  return communicator_->gather_async(const_bytes_of(input), out, dtype, options.root,
                                     keeping(comparing(input, options.deadline), output, input));
}

void ProcessGroup::scatter(const at::Tensor& output, const at::Tensor& input,
                           const ScatterOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "scatter", options.root, output, input,
                                   /*output_is_large=*/false);
  const ConstBytes in = rank() == options.root ? const_bytes_of(input) : ConstBytes();
  communicator_->scatter(in, bytes_of(output), dtype, options.root,
                         comparing(output, options.deadline));
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const at::Tensor& input,
                                 const ScatterOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "scatter_async", options.root, output, input,
                                   /*output_is_large=*/false);
  const ConstBytes in = rank() == options.root ? const_bytes_of(input) : ConstBytes();
  return communicator_->scatter_async(in, bytes_of(output), dtype, options.root,
                                      keeping(comparing(output, options.deadline), output, input));
}

void ProcessGroup::all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                     const AllToAllOptions& options) const {
  const Exchange exchange =
      check_exchange(*communicator_, "all_to_all_single", output, input, options);
  if (exchange.input_counts.empty()) {
    communicator_->all_to_all(const_bytes_of(input), bytes_of(output), exchange.dtype,
                              comparing(input, options.deadline));
    return;
  }
  communicator_->all_to_all_v(const_bytes_of(input), bytes_of(output), exchange.dtype,
                              {exchange.input_counts, exchange.output_counts},
                              {.deadline = options.deadline});
}

Work ProcessGroup::all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                                           const AllToAllOptions& options) const {
  const Exchange exchange =
      check_exchange(*communicator_, "all_to_all_single_async", output, input, options);
  if (exchange.input_counts.empty()) {
    return communicator_->all_to_all_async(
        const_bytes_of(input), bytes_of(output), exchange.dtype,
        keeping(comparing(input, options.deadline), output, input));
  }
  return communicator_->all_to_all_v_async(const_bytes_of(input), bytes_of(output), exchange.dtype,
                                           {exchange.input_counts, exchange.output_counts},
                                           keeping({.deadline = options.deadline}, output, input));
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
                                   keeping({.deadline = options.deadline}, packed));
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
                                   keeping({.deadline = options.deadline}, tensor));
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
