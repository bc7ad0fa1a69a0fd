#include "cadre/group/process_group.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <string_view>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/collective/reduction_table.h"
#include "cadre/group/dtype.h"

namespace cadre {

namespace {

[[noreturn]] void refuse(const Communicator& communicator, std::string_view operation,
                         const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("{} on group \"{}\", rank {}: {}", operation, communicator.name(),
                     communicator.rank(), problem));
}

std::string shape_of(const at::Tensor& tensor) {
  std::string text = "(";
  for (const int64_t size : tensor.sizes()) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + ")";
}

// The dtype of a tensor that can take part; `role` is "the tensor", "the input", "the output".
DType check(const Communicator& communicator, std::string_view operation, std::string_view role,
            const at::Tensor& tensor) {
  if (!tensor.defined()) {
    refuse(communicator, operation, format("{} is undefined; pass one with data", role));
  }
  if (tensor.layout() != at::kStrided) {
    refuse(communicator, operation,
           format("{} {} is sparse; only dense tensors are exchanged: use to_dense()", role,
                  shape_of(tensor)));
  }
  if (!tensor.device().is_cpu()) {
    refuse(communicator, operation,
           format("{} {} is on {}; this group exchanges CPU tensors: use cpu()", role,
                  shape_of(tensor), tensor.device().str()));
  }
  // Its memory holds the numbers with the other sign.
  if (tensor.is_neg()) {
    refuse(communicator, operation,
           format("{} {} is a negated view; pass tensor.resolve_neg()", role, shape_of(tensor)));
  }
  const std::optional<DType> dtype = to_dtype(tensor.scalar_type());
  if (!dtype) {
    refuse(communicator, operation,
           format("{} {} is {}; supported are {}", role, shape_of(tensor),
                  c10::toString(tensor.scalar_type()), dtype_names()));
  }
  return *dtype;
}

void check_contiguous(const Communicator& communicator, std::string_view operation,
                      std::string_view role, const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  refuse(communicator, operation,
         format("{} {} is not contiguous; pass {}.contiguous()", role, shape_of(tensor), "tensor"));
}

void check_reduce_op(const Communicator& communicator, std::string_view operation, DType dtype,
                     ReduceOp op) {
  const Status status = check_reduction(dtype, op);
  if (!status.ok()) refuse(communicator, operation, status.error().message());
}

// Two tensors may share memory only where the engines allow it: the small one is this rank's slice
// of the large one.
void check_aliasing(const Communicator& communicator, std::string_view operation,
                    const at::Tensor& large, const at::Tensor& small) {
  const auto* whole = static_cast<const std::byte*>(large.const_data_ptr());
  const auto* part = static_cast<const std::byte*>(small.const_data_ptr());
  const bool is_apart =
      small.numel() == 0 || part + small.nbytes() <= whole || whole + large.nbytes() <= part;
  const auto rank = static_cast<size_t>(communicator.rank().value);
  if (is_apart || part == whole + rank * small.nbytes()) return;
  refuse(communicator, operation,
         format("the input and the output share memory, and {} is not slice {} of {}; pass that "
                "slice or a clone()",
                shape_of(small), communicator.rank(), shape_of(large)));
}

// Of two tensors that exchange data.
DType check_two(const Communicator& communicator, std::string_view operation,
                const at::Tensor& output, const at::Tensor& input) {
  const DType dtype = check(communicator, operation, "the input", input);
  if (check(communicator, operation, "the output", output) != dtype) {
    refuse(communicator, operation,
           format("the input is {} but the output is {}; both must have one dtype",
                  c10::toString(input.scalar_type()), c10::toString(output.scalar_type())));
  }
  check_contiguous(communicator, operation, "the input", input);
  check_contiguous(communicator, operation, "the output", output);
  return dtype;
}

// Of the pair of an all_gather or reduce_scatter: `large` has world_size times the elements.
DType check_pair(const Communicator& communicator, std::string_view operation,
                 const at::Tensor& output, const at::Tensor& input, bool output_is_large) {
  const DType dtype = check_two(communicator, operation, output, input);
  const at::Tensor& large = output_is_large ? output : input;
  const at::Tensor& small = output_is_large ? input : output;
  if (large.numel() != small.numel() * communicator.world_size()) {
    refuse(communicator, operation,
           format("the {} has {} elements {}, expected world size {} times the {}'s {} {}",
                  output_is_large ? "output" : "input", large.numel(), shape_of(large),
                  communicator.world_size(), output_is_large ? "input" : "output", small.numel(),
                  shape_of(small)));
  }
  check_aliasing(communicator, operation, large, small);
  return dtype;
}

// Of gather and scatter: only the root has the large tensor.
DType check_rooted(const Communicator& communicator, std::string_view operation, Rank root,
                   const at::Tensor& output, const at::Tensor& input, bool output_is_large) {
  if (communicator.rank() == root) {
    return check_pair(communicator, operation, output, input, output_is_large);
  }
  const std::string_view role = output_is_large ? "the input" : "the output";
  const at::Tensor& small = output_is_large ? input : output;
  const DType dtype = check(communicator, operation, role, small);
  check_contiguous(communicator, operation, role, small);
  return dtype;
}

// The elements for, or from, each rank: `splits` are rows of the tensor, none of them even ones.
std::vector<uint64_t> split_counts(const Communicator& communicator, std::string_view operation,
                                   std::string_view role, const at::Tensor& tensor,
                                   const std::vector<int64_t>& splits) {
  const auto world_size = static_cast<size_t>(communicator.world_size());
  const int64_t num_rows = tensor.size(0);
  if (splits.empty()) {
    return std::vector<uint64_t>(world_size, static_cast<uint64_t>(tensor.numel()) / world_size);
  }
  if (splits.size() != world_size) {
    refuse(communicator, operation,
           format("{} {} has {} splits, expected one for each of {} ranks", role, shape_of(tensor),
                  splits.size(), world_size));
  }
  const int64_t row = num_rows == 0 ? 0 : tensor.numel() / num_rows;
  std::vector<uint64_t> counts;
  int64_t left = num_rows;
  for (const int64_t split : splits) {
    if (split < 0 || split > left) {
      refuse(communicator, operation,
             format("{} {} cannot give {} rows where {} are left; splits are >= 0 and add up to "
                    "its dimension 0",
                    role, shape_of(tensor), split, left));
    }
    left -= split;
    counts.push_back(static_cast<uint64_t>(split * row));
  }
  if (left > 0) {
    refuse(communicator, operation,
           format("the splits of {} {} add up to {}, expected {}", role, shape_of(tensor),
                  num_rows - left, num_rows));
  }
  return counts;
}

void check_divisible(const Communicator& communicator, std::string_view operation,
                     std::string_view role, const at::Tensor& tensor,
                     const std::vector<int64_t>& splits) {
  if (tensor.dim() == 0) {
    refuse(communicator, operation,
           format("{} has no dimension 0 to be split; pass view({{1}})", role));
  }
  if (!splits.empty() || tensor.size(0) % communicator.world_size() == 0) return;
  refuse(communicator, operation,
         format("dimension 0 of {} {} is no multiple of the world size {}; pass splits", role,
                shape_of(tensor), communicator.world_size()));
}

// What all_to_all_single exchanges: even parts when `counts` are empty.
struct Exchange {
  DType dtype;
  std::vector<uint64_t> input_counts;
  std::vector<uint64_t> output_counts;
};

Exchange check_exchange(const Communicator& communicator, std::string_view operation,
                        const at::Tensor& output, const at::Tensor& input,
                        const AllToAllOptions& options) {
  Exchange exchange{check_two(communicator, operation, output, input), {}, {}};
  check_divisible(communicator, operation, "the input", input, options.input_split_sizes);
  check_divisible(communicator, operation, "the output", output, options.output_split_sizes);
  if (options.input_split_sizes.empty() && options.output_split_sizes.empty()) {
    if (input.numel() == output.numel()) return exchange;
    refuse(communicator, operation,
           format("the output has {} elements {}, expected the input's {} {}; pass splits",
                  output.numel(), shape_of(output), input.numel(), shape_of(input)));
  }
  exchange.input_counts =
      split_counts(communicator, operation, "the input", input, options.input_split_sizes);
  exchange.output_counts =
      split_counts(communicator, operation, "the output", output, options.output_split_sizes);
  return exchange;
}

Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

ConstBytes const_bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

template <typename... Tensors>
CollectiveOptions keeping(std::optional<Deadline> deadline, const Tensors&... tensors) {
  using Kept = std::array<at::Tensor, sizeof...(Tensors)>;
  return {.deadline = deadline, .keep_alive = std::make_shared<const Kept>(Kept{tensors...})};
}

CollectiveOptions with_factor(CollectiveOptions options, std::optional<double> premul_factor) {
  options.premul_factor = premul_factor;
  return options;
}

// An expanded tensor could not hold a result for each of its elements.
void check_elements_apart(const Communicator& communicator, std::string_view name,
                          const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor) != at::MemOverlap::Yes) return;
  refuse(communicator, name,
         format("elements of the tensor {} share memory, as after expand(); pass tensor.clone()",
                shape_of(tensor)));
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

Rank ProcessGroup::rank() const {
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
  const DType dtype = check(*communicator_, "all_reduce", "the tensor", tensor);
  check_reduce_op(*communicator_, "all_reduce", dtype, options.op);
  run_packed(*communicator_, "all_reduce", tensor, [&](const at::Tensor& data) {
    communicator_->all_reduce(const_bytes_of(data), bytes_of(data), dtype, options.op,
                              with_factor({.deadline = options.deadline}, options.premul_factor));
  });
}

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor,
                                    const AllReduceOptions& options) const {
  const DType dtype = check(*communicator_, "all_reduce_async", "the tensor", tensor);
  check_reduce_op(*communicator_, "all_reduce_async", dtype, options.op);
  check_contiguous(*communicator_, "all_reduce_async", "the tensor", tensor);
  return communicator_->all_reduce_async(
      const_bytes_of(tensor), bytes_of(tensor), dtype, options.op,
      with_factor(keeping(options.deadline, tensor), options.premul_factor));
}

void ProcessGroup::broadcast(const at::Tensor& tensor, const BroadcastOptions& options) const {
  const DType dtype = check(*communicator_, "broadcast", "the tensor", tensor);
  run_packed(*communicator_, "broadcast", tensor, [&](const at::Tensor& data) {
    communicator_->broadcast(bytes_of(data), dtype, options.root, {.deadline = options.deadline});
  });
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor,
                                   const BroadcastOptions& options) const {
  const DType dtype = check(*communicator_, "broadcast_async", "the tensor", tensor);
  check_contiguous(*communicator_, "broadcast_async", "the tensor", tensor);
  return communicator_->broadcast_async(bytes_of(tensor), dtype, options.root,
                                        keeping(options.deadline, tensor));
}

void ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input,
                              const AllGatherOptions& options) const {
  const DType dtype = check_pair(*communicator_, "all_gather", output, input, true);
  communicator_->all_gather(const_bytes_of(input), bytes_of(output), dtype,
                            {.deadline = options.deadline});
}

Work ProcessGroup::all_gather_async(const at::Tensor& output, const at::Tensor& input,
                                    const AllGatherOptions& options) const {
  const DType dtype = check_pair(*communicator_, "all_gather_async", output, input, true);
  return communicator_->all_gather_async(const_bytes_of(input), bytes_of(output), dtype,
                                         keeping(options.deadline, output, input));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  const ReduceScatterOptions& options) const {
  const DType dtype = check_pair(*communicator_, "reduce_scatter", output, input, false);
  check_reduce_op(*communicator_, "reduce_scatter", dtype, options.op);
  communicator_->reduce_scatter(const_bytes_of(input), bytes_of(output), dtype, options.op,
                                with_factor({.deadline = options.deadline}, options.premul_factor));
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                        const ReduceScatterOptions& options) const {
  const DType dtype = check_pair(*communicator_, "reduce_scatter_async", output, input, false);
  check_reduce_op(*communicator_, "reduce_scatter_async", dtype, options.op);
  return communicator_->reduce_scatter_async(
      const_bytes_of(input), bytes_of(output), dtype, options.op,
      with_factor(keeping(options.deadline, output, input), options.premul_factor));
}

void ProcessGroup::reduce(const at::Tensor& tensor, const ReduceOptions& options) const {
  const DType dtype = check(*communicator_, "reduce", "the tensor", tensor);
  check_reduce_op(*communicator_, "reduce", dtype, options.op);
  const CollectiveOptions call = with_factor({.deadline = options.deadline}, options.premul_factor);
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
  const DType dtype = check(*communicator_, "reduce_async", "the tensor", tensor);
  check_reduce_op(*communicator_, "reduce_async", dtype, options.op);
  check_contiguous(*communicator_, "reduce_async", "the tensor", tensor);
  const Bytes out = rank() == options.root ? bytes_of(tensor) : Bytes();
  return communicator_->reduce_async(
      const_bytes_of(tensor), out, dtype, options.op, options.root,
      with_factor(keeping(options.deadline, tensor), options.premul_factor));
}

void ProcessGroup::gather(const at::Tensor& output, const at::Tensor& input,
                          const GatherOptions& options) const {
  const DType dtype =
      check_rooted(*communicator_, "gather", options.root, output, input, /*output_is_large=*/true);
  const Bytes out = rank() == options.root ? bytes_of(output) : Bytes();
  communicator_->gather(const_bytes_of(input), out, dtype, options.root,
                        {.deadline = options.deadline});
}

Work ProcessGroup::gather_async(const at::Tensor& output, const at::Tensor& input,
                                const GatherOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "gather_async", options.root, output, input,
                                   /*output_is_large=*/true);
  const Bytes out = rank() == options.root ? bytes_of(output) : Bytes();
  return communicator_->gather_async(const_bytes_of(input), out, dtype, options.root,
                                     keeping(options.deadline, output, input));
}

void ProcessGroup::scatter(const at::Tensor& output, const at::Tensor& input,
                           const ScatterOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "scatter", options.root, output, input,
                                   /*output_is_large=*/false);
  const ConstBytes in = rank() == options.root ? const_bytes_of(input) : ConstBytes();
  communicator_->scatter(in, bytes_of(output), dtype, options.root, {.deadline = options.deadline});
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const at::Tensor& input,
                                 const ScatterOptions& options) const {
  const DType dtype = check_rooted(*communicator_, "scatter_async", options.root, output, input,
                                   /*output_is_large=*/false);
  const ConstBytes in = rank() == options.root ? const_bytes_of(input) : ConstBytes();
  return communicator_->scatter_async(in, bytes_of(output), dtype, options.root,
                                      keeping(options.deadline, output, input));
}

void ProcessGroup::all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                     const AllToAllOptions& options) const {
  const Exchange exchange =
      check_exchange(*communicator_, "all_to_all_single", output, input, options);
  const CollectiveOptions call{.deadline = options.deadline};
  if (exchange.input_counts.empty()) {
    communicator_->all_to_all(const_bytes_of(input), bytes_of(output), exchange.dtype, call);
    return;
  }
  communicator_->all_to_all_v(const_bytes_of(input), bytes_of(output), exchange.dtype,
                              {exchange.input_counts, exchange.output_counts}, call);
}

Work ProcessGroup::all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                                           const AllToAllOptions& options) const {
  const Exchange exchange =
      check_exchange(*communicator_, "all_to_all_single_async", output, input, options);
  const CollectiveOptions call = keeping(options.deadline, output, input);
  if (exchange.input_counts.empty()) {
    return communicator_->all_to_all_async(const_bytes_of(input), bytes_of(output), exchange.dtype,
                                           call);
  }
  return communicator_->all_to_all_v_async(const_bytes_of(input), bytes_of(output), exchange.dtype,
                                           {exchange.input_counts, exchange.output_counts}, call);
}

void ProcessGroup::barrier(const BarrierOptions& options) const {
  communicator_->barrier({.deadline = options.deadline});
}

void ProcessGroup::send(const at::Tensor& tensor, Rank destination,
                        const SendOptions& options) const {
  const DType dtype = check(*communicator_, "send", "the tensor", tensor);
  const at::Tensor packed = tensor.detach().contiguous();
  communicator_->send(const_bytes_of(packed), dtype, destination, options.tag,
                      {.deadline = options.deadline});
}

Work ProcessGroup::send_async(const at::Tensor& tensor, Rank destination,
                              const SendOptions& options) const {
  const DType dtype = check(*communicator_, "send_async", "the tensor", tensor);
  const at::Tensor packed = tensor.detach().contiguous();
  return communicator_->send_async(const_bytes_of(packed), dtype, destination, options.tag,
                                   keeping(options.deadline, packed));
}

void ProcessGroup::recv(const at::Tensor& tensor, Rank source, const SendOptions& options) const {
  const DType dtype = check(*communicator_, "recv", "the tensor", tensor);
  run_packed(*communicator_, "recv", tensor, [&](const at::Tensor& data) {
    communicator_->recv(bytes_of(data), dtype, source, options.tag, {.deadline = options.deadline});
  });
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, Rank source,
                              const SendOptions& options) const {
  const DType dtype = check(*communicator_, "recv_async", "the tensor", tensor);
  check_contiguous(*communicator_, "recv_async", "the tensor", tensor);
  return communicator_->recv_async(bytes_of(tensor), dtype, source, options.tag,
                                   keeping(options.deadline, tensor));
}

at::Tensor ProcessGroup::empty_symmetric(int64_t numel, at::ScalarType type) const {
  const std::optional<DType> dtype = to_dtype(type);
  if (!dtype || numel < 0) {
    refuse(*communicator_, "empty_symmetric",
           format("{} elements of {} cannot be exchanged; pass a count >= 0 and one of {}", numel,
                  c10::toString(type), dtype_names()));
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

void ProcessGroup::abort(const std::string& reason) const {
  communicator_->abort(reason);
}

void ProcessGroup::close() const {
  communicator_->close(communicator_->system().deadline_in(kDefaultCloseTimeout));
}

}  // namespace cadre
