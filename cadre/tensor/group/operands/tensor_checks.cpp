#include "cadre/tensor/group/operands/tensor_checks.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"
#include "cadre/core/comm/checks.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/group/operands/dtype.h"

namespace cadre {

std::string shape_of(const at::Tensor& tensor) {
  return list_of(tensor.sizes());
}

namespace {

// Returns the end of an error message for a tensor that is accepted after `conversion`, such as
// "contiguous()".
std::string instead_of(std::string_view role, std::string_view conversion) {
  if (role == kInput) return format("pass input.{}", conversion);
  const std::string_view name = role == kOutput ? "output" : "tensor";
  return format(
      "keep copy = {0}.{1}, pass the copy and, when the operation is done, call "
      "{0}.copy_(copy)",
      name, conversion);
}

// Returns what to do with a tensor of a dtype that is not supported. A complex tensor has a view as
// pairs of real numbers, which the operation may change in place. A sum, mean or copy of the pairs
// is that of the complex numbers.
std::string remedy_of_dtype(std::string_view role, const at::Tensor& tensor) {
  const std::string_view name = role == kInput ? "input" : role == kOutput ? "output" : "tensor";
  if (tensor.is_complex()) {
    return format(
        "pass torch::view_as_real({}), its real and imaginary parts, which may be "
        "gathered, sent, added up and averaged, but not multiplied or compared",
        name);
  }
  if (c10::isFloat8Type(tensor.scalar_type())) return instead_of(role, "to(torch::kBFloat16)");
  return instead_of(role, "to() with one of these dtypes");
}

// Checks that the two tensors share no memory, or that the small one is exactly this rank's slice
// of the large one, which the engines allow.
void check_aliasing(const Communicator& communicator, std::string_view operation,
                    const at::Tensor& large, const at::Tensor& small) {
  const auto* whole = static_cast<const std::byte*>(large.const_data_ptr());
  const auto* part = static_cast<const std::byte*>(small.const_data_ptr());
  const bool is_apart =
      small.numel() == 0 || part + small.nbytes() <= whole || whole + large.nbytes() <= part;
  const auto rank = static_cast<size_t>(communicator.rank().value);
  if (is_apart || part == whole + rank * small.nbytes()) return;
  refuse_tensor(communicator, operation,
                format("the input and the output share memory, and the smaller tensor {} is not "
                       "slice {} of the larger one {}; pass that slice, or a clone() of the input",
                       shape_of(small), communicator.rank(), shape_of(large)));
}

// Throws where torch's in-place operations would: while grad mode is on, for a leaf that requires
// grad or a view of one.
void check_may_change(const Communicator& communicator, std::string_view operation,
                      std::string_view role, const at::Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return;
  const bool is_of_leaf = tensor.is_view() && tensor._base().is_leaf();
  if (!tensor.is_leaf() && !is_of_leaf) return;
  refuse_tensor(communicator, operation,
                format("{} {} is {} leaf that requires grad, which is not changed in place while "
                       "gradients are recorded; call this under torch::NoGradGuard",
                       role, shape_of(tensor), is_of_leaf ? "a view of a" : "a"));
}

// Checks two tensors that exchange data; returns their dtype.
DType check_two(const Communicator& communicator, std::string_view operation,
                const at::Tensor& output, const at::Tensor& input) {
  const DType dtype = check_tensor(communicator, operation, kInput, input);
  if (check_tensor(communicator, operation, kOutput, output) != dtype) {
    refuse_tensor(communicator, operation,
                  format("the input is {} but the output is {}; both must have the same dtype",
                         dtype_name(input.scalar_type()), dtype_name(output.scalar_type())));
  }
  check_contiguous(communicator, operation, kInput, input);
  check_contiguous(communicator, operation, kOutput, output);
  return dtype;
}

// Returns the number of elements for, or from, each rank. `splits` counts rows of the tensor; if it
// is empty, all ranks have equal parts.
std::vector<uint64_t> split_counts(const Communicator& communicator, std::string_view operation,
                                   std::string_view role, const at::Tensor& tensor,
                                   std::span<const int64_t> splits) {
  const auto world_size = static_cast<size_t>(communicator.world_size());
  const int64_t num_rows = tensor.size(0);
  if (splits.empty()) {
    return std::vector<uint64_t>(world_size, static_cast<uint64_t>(tensor.numel()) / world_size);
  }
  if (splits.size() != world_size) {
    refuse_tensor(communicator, operation,
                  format("{} {} has {} splits, expected one for each of {} ranks", role,
                         shape_of(tensor), splits.size(), world_size));
  }
  const int64_t row = num_rows == 0 ? 0 : tensor.numel() / num_rows;
  std::vector<uint64_t> counts;
  int64_t left = num_rows;
  for (const int64_t split : splits) {
    if (split < 0 || split > left) {
      refuse_tensor(communicator, operation,
                    format("{} {} has a split of {} rows, but {} rows are left; splits must be >= "
                           "0 and add up to its size in dimension 0",
                           role, shape_of(tensor), split, left));
    }
    left -= split;
    counts.push_back(static_cast<uint64_t>(split * row));
  }
  if (left > 0) {
    refuse_tensor(communicator, operation,
                  format("the splits of {} {} add up to {}, expected {}", role, shape_of(tensor),
                         num_rows - left, num_rows));
  }
  return counts;
}

void check_device(const Communicator& communicator, std::string_view operation,
                  std::string_view role, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return;
  const std::optional<Device> own = communicator.device();
  if (own && device::to_core(tensor.device()) == own) return;
  const std::string where = format("{} {} is on {}", role, shape_of(tensor), tensor.device().str());
  if (!own) {
    refuse_tensor(
        communicator, operation,
        format("{}; this group exchanges CPU tensors: {}", where, instead_of(role, "cpu()")));
  }
  refuse_tensor(communicator, operation,
                format("{}, but this rank's device in the group is {}: {}", where, to_string(*own),
                       instead_of(role, format("to(\"{}\")", to_string(*own)))));
}

void check_divisible(const Communicator& communicator, std::string_view operation,
                     std::string_view role, const at::Tensor& tensor,
                     std::span<const int64_t> splits) {
  if (tensor.dim() == 0) {
    refuse_tensor(communicator, operation,
                  format("{} has no dimension 0 to be split; pass view({{1}})", role));
  }
  if (!splits.empty() || tensor.size(0) % communicator.world_size() == 0) return;
  refuse_tensor(communicator, operation,
                format("dimension 0 of {} {} is no multiple of the world size {}; pass splits",
                       role, shape_of(tensor), communicator.world_size()));
}

}  // namespace

void refuse_tensor(const Communicator& communicator, std::string_view operation,
                   const std::string& problem) {
  throw refusal_of(communicator, operation, problem);
}

DType check_tensor(const Communicator& communicator, std::string_view operation,
                   std::string_view role, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    refuse_tensor(communicator, operation, format("{} is undefined; pass one with data", role));
  }
  if (tensor.layout() != at::kStrided) {
    refuse_tensor(communicator, operation,
                  format("{} {} is sparse; only dense tensors are exchanged: {}", role,
                         shape_of(tensor), instead_of(role, "to_dense()")));
  }
  if (tensor.is_meta()) {
    refuse_tensor(
        communicator, operation,
        format("{} {} is on meta, so it has a shape and no values; {}", role, shape_of(tensor),
               role == kOutput ? "pass one with memory: torch::empty_like(output, "
                                 "torch::kCPU)"
                               : "give it values first: for a module from defer_init(), "
                                 "call cadre::materialize() or wrap the module"));
  }
  check_device(communicator, operation, role, tensor);
  if (!tensor.is_cpu() && device::is_capture_current(tensor.device())) {
    refuse_tensor(communicator, operation,
                  format("{} {} is on {}, whose current stream records a graph, and the operations "
                         "of a group cannot be part of a graph: call them outside of the capture",
                         role, shape_of(tensor), tensor.device().str()));
  }
  // A negated view is refused, because its memory holds the values with the opposite sign.
  if (tensor.is_neg()) {
    refuse_tensor(communicator, operation,
                  format("{} {} is a negated view; {}", role, shape_of(tensor),
                         instead_of(role, "resolve_neg()")));
  }
  if (tensor._is_zerotensor()) {
    refuse_tensor(communicator, operation,
                  format("{} {} is a zero tensor without memory; {}", role, shape_of(tensor),
                         instead_of(role, "clone()")));
  }
  const std::optional<DType> dtype = to_dtype(tensor.scalar_type());
  if (!dtype) {
    refuse_tensor(
        communicator, operation,
        format("{} {} is {}; supported are {}; {}", role, shape_of(tensor),
               dtype_name(tensor.scalar_type()), dtype_names(), remedy_of_dtype(role, tensor)));
  }
  if (role != kInput) check_may_change(communicator, operation, role, tensor);
  return *dtype;
}

void check_one_device(const Communicator& communicator, std::string_view operation,
                      const at::Tensor& one, const at::Tensor& other) {
  if (one.device() == other.device()) return;
  refuse_tensor(communicator, operation,
                format("its tensors are on {} and {}; move them to one device", one.device().str(),
                       other.device().str()));
}

void check_contiguous(const Communicator& communicator, std::string_view operation,
                      std::string_view role, const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  const std::string copies_back =
      role == kInPlace ? ", or call the operation without _async, which does that" : "";
  refuse_tensor(communicator, operation,
                format("{} {} is not contiguous; {}{}", role, shape_of(tensor),
                       instead_of(role, "contiguous()"), copies_back));
}

void check_reduce_op(const Communicator& communicator, std::string_view operation, DType dtype,
                     ReduceOp op) {
  const Status status = check_reduction(dtype, op);
  if (!status.ok()) refuse_tensor(communicator, operation, status.error().message());
}

DType check_pair(const Communicator& communicator, std::string_view operation,
                 const at::Tensor& output, const at::Tensor& input, bool output_is_large) {
  const DType dtype = check_two(communicator, operation, output, input);
  const at::Tensor& large = output_is_large ? output : input;
  const at::Tensor& small = output_is_large ? input : output;
  if (large.numel() != small.numel() * communicator.world_size()) {
    refuse_tensor(communicator, operation,
                  format("the {} has {} elements {}, expected world size {} times the {}'s {} {}",
                         output_is_large ? "output" : "input", large.numel(), shape_of(large),
                         communicator.world_size(), output_is_large ? "input" : "output",
                         small.numel(), shape_of(small)));
  }
  check_aliasing(communicator, operation, large, small);
  return dtype;
}

DType check_rooted(const Communicator& communicator, std::string_view operation, Rank root,
                   const at::Tensor& output, const at::Tensor& input, bool output_is_large) {
  if (communicator.rank() == root) {
    return check_pair(communicator, operation, output, input, output_is_large);
  }
  const std::string_view role = output_is_large ? kInput : kOutput;
  const at::Tensor& small = output_is_large ? input : output;
  const DType dtype = check_tensor(communicator, operation, role, small);
  check_contiguous(communicator, operation, role, small);
  return dtype;
}

Exchange check_exchange(const Communicator& communicator, std::string_view operation,
                        const at::Tensor& output, const at::Tensor& input,
                        const RowSplits& splits) {
  Exchange exchange{check_two(communicator, operation, output, input), {}, {}};
  check_divisible(communicator, operation, kInput, input, splits.input);
  check_divisible(communicator, operation, kOutput, output, splits.output);
  if (splits.input.empty() && splits.output.empty()) {
    if (input.numel() == output.numel()) return exchange;
    refuse_tensor(communicator, operation,
                  format("the output has {} elements {}, expected the input's {} {}; pass splits",
                         output.numel(), shape_of(output), input.numel(), shape_of(input)));
  }
  exchange.input_counts = split_counts(communicator, operation, kInput, input, splits.input);
  exchange.output_counts = split_counts(communicator, operation, kOutput, output, splits.output);
  return exchange;
}

void check_entries_apart(const Communicator& communicator, std::string_view operation,
                         std::initializer_list<const std::vector<at::Tensor>*> lists) {
  struct Extent {
    const std::byte* begin;
    const std::byte* end;
    size_t entry;
  };
  std::vector<Extent> extents;
  for (const std::vector<at::Tensor>* list : lists) {
    for (size_t i = 0; i < list->size(); ++i) {
      const at::Tensor& tensor = (*list)[i];
      const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
      const bool is_dense = tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
      const size_t num_bytes = is_dense ? tensor.nbytes() : tensor.element_size();
      if (tensor.numel() > 0) extents.push_back({begin, begin + num_bytes, i});
    }
  }
  std::ranges::sort(extents, std::less<>(), &Extent::begin);
  for (size_t i = 1; i < extents.size(); ++i) {
    Extent& next = extents[i];
    const Extent& before = extents[i - 1];
    if (next.begin < before.end && next.entry != before.entry) {
      const auto [first, second] = std::minmax(before.entry, next.entry);
      refuse_tensor(communicator, operation,
                    format("the tensors {} and {} of the list share memory; pass tensors that do "
                           "not overlap",
                           first, second));
    }
    next.end = std::max(next.end, before.end);
  }
}

DType check_list(const Communicator& communicator, std::string_view operation,
                 std::string_view listed, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != static_cast<size_t>(communicator.world_size())) {
    refuse_tensor(communicator, operation,
                  format("the list of {}s has {} tensors, expected one for each of {} ranks",
                         listed.substr(4), tensors.size(), communicator.world_size()));
  }
  std::optional<DType> first;
  for (const at::Tensor& tensor : tensors) {
    const DType dtype = check_tensor(communicator, operation, listed, tensor);
    if (listed == kOutput) check_elements_apart(communicator, operation, tensor);
    if (dtype == first.value_or(dtype)) {
      first = dtype;
      continue;
    }
    refuse_tensor(communicator, operation,
                  format("the {}s are {} and {}; all must have the same dtype", listed.substr(4),
                         *first, dtype));
  }
  for (const at::Tensor& tensor : tensors) {
    check_one_device(communicator, operation, tensors.front(), tensor);
  }
  if (listed == kOutput) check_entries_apart(communicator, operation, {&tensors});
  return *first;
}

DType check_beside_list(const Communicator& communicator, std::string_view operation,
                        std::string_view role, const at::Tensor& tensor,
                        const std::vector<at::Tensor>& tensors) {
  const DType dtype = check_tensor(communicator, operation, role, tensor);
  if (role == kOutput) check_elements_apart(communicator, operation, tensor);
  if (tensors.empty()) return dtype;
  check_one_device(communicator, operation, tensor, tensors.front());
  const at::Tensor& own = tensors[static_cast<size_t>(communicator.rank().value)];
  if (tensor.scalar_type() == own.scalar_type() && tensor.numel() == own.numel()) return dtype;
  refuse_tensor(communicator, operation,
                format("{} is {} {}, but this rank's tensor in the list is {} {}; both must have "
                       "the same dtype and number of elements",
                       role, dtype_name(tensor.scalar_type()), shape_of(tensor),
                       dtype_name(own.scalar_type()), shape_of(own)));
}

at::Tensor with_values_in_memory(const at::Tensor& tensor) {
  return tensor.is_neg() || tensor._is_zerotensor() ? tensor.clone() : tensor;
}

bool carries_tangent(const at::Tensor& tensor) {
  return tensor._fw_grad(/*level=*/0).defined();
}

void check_elements_apart(const Communicator& communicator, std::string_view name,
                          const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor) != at::MemOverlap::Yes) return;
  refuse_tensor(
      communicator, name,
      format("elements of the tensor {} share memory, as after expand(), so it cannot hold a "
             "result; keep copy = tensor.clone(), pass the copy and use that",
             shape_of(tensor)));
}

}  // namespace cadre
