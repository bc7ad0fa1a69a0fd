// Checks the tensors that a program passes to an operation of a group.
//
// Threads: any. Blocking: never. Errors: each throws kInvalidArgument that names the operation, the
// group and this rank, says what was passed and what to pass instead.
// `role` is kInPlace, kInput or kOutput. The message advises a temporary copy only for an input,
// because the result of an output or in-place tensor would be lost in it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"

namespace cadre {

// The upper limit of a number of elements: more than any memory holds, but small enough that the
// number of bytes does not overflow.
inline constexpr int64_t kMaxElements = int64_t{1} << 52;

inline constexpr std::string_view kInPlace = "the tensor";
inline constexpr std::string_view kInput = "the input";
inline constexpr std::string_view kOutput = "the output";

// Returns the shape as text, such as "(2, 3)".
std::string shape_of(const at::Tensor& tensor);

[[noreturn]] void refuse_tensor(const Communicator& communicator, std::string_view operation,
                                const std::string& problem);

// Checks one tensor and returns its dtype. It is on the CPU or on this rank's device in the group.
// A tensor that is not only an input must also be one that autograd allows to be changed in place.
DType check_tensor(const Communicator& communicator, std::string_view operation,
                   std::string_view role, const at::Tensor& tensor);
// Checks that both tensors of a call are on one device.
void check_one_device(const Communicator& communicator, std::string_view operation,
                      const at::Tensor& one, const at::Tensor& other);
void check_contiguous(const Communicator& communicator, std::string_view operation,
                      std::string_view role, const at::Tensor& tensor);
// Throws for an expanded tensor, which cannot hold a result for each of its elements.
void check_elements_apart(const Communicator& communicator, std::string_view operation,
                          const at::Tensor& tensor);
void check_reduce_op(const Communicator& communicator, std::string_view operation, DType dtype,
                     ReduceOp op);

// Returns the tensor itself, or a copy if it is lazy, so that its memory does not hold its values:
// autograd produces negated views (the derivatives of complex operators) and zero tensors without
// memory. Differentiable.
at::Tensor with_values_in_memory(const at::Tensor& tensor);
// Returns whether the tensor has a tangent of forward-mode differentiation.
bool carries_tangent(const at::Tensor& tensor);

// Checks the pair of an all_gather or reduce_scatter: the large tensor, which is the output or the
// input, has world_size times the elements of the other.
DType check_pair(const Communicator& communicator, std::string_view operation,
                 const at::Tensor& output, const at::Tensor& input, bool output_is_large);
// Checks the pair of a gather or scatter: only the root has the large tensor.
DType check_rooted(const Communicator& communicator, std::string_view operation, Rank root,
                   const at::Tensor& output, const at::Tensor& input, bool output_is_large);

// Throws if tensors with different indices in the lists share memory. Tensors with the same index
// (an output and its input) may share memory. For a tensor with gaps between its elements, only the
// first element is checked.
void check_entries_apart(const Communicator& communicator, std::string_view operation,
                         std::initializer_list<const std::vector<at::Tensor>*> lists);

// Checks a list, which must have one tensor for each rank and one dtype, and returns that dtype.
// `listed` is kInput or kOutput.
DType check_list(const Communicator& communicator, std::string_view operation,
                 std::string_view listed, const std::vector<at::Tensor>& tensors);
// Checks the single tensor of an operation between a tensor and a list: it must have the dtype of
// the list and, if this rank passes a list, as many elements as this rank's tensor in it. Returns
// the dtype.
DType check_beside_list(const Communicator& communicator, std::string_view operation,
                        std::string_view role, const at::Tensor& tensor,
                        const std::vector<at::Tensor>& tensors);

// The splits of an all_to_all: how many rows of `output` come from each rank, and how many of the
// input go to each rank. An empty list divides the rows evenly.
struct RowSplits {
  std::span<const int64_t> output;
  std::span<const int64_t> input;
};

// The dtype and element counts of an all_to_all. Empty `counts` mean that all parts are equal.
struct Exchange {
  DType dtype;
  std::vector<uint64_t> input_counts;
  std::vector<uint64_t> output_counts;
};
Exchange check_exchange(const Communicator& communicator, std::string_view operation,
                        const at::Tensor& output, const at::Tensor& input, const RowSplits& splits);

}  // namespace cadre
