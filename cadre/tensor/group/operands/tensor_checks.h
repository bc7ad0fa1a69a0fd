// Checks of the tensors of an operation.
//
// Threads: any. Blocking: never. Errors: each throws kInvalidArgument that names the operation, the
// group and this rank, says what was passed and what to pass instead.
// `role` is kInPlace, kInput or kOutput. A remedy in a message never loses a result: it replaces
// only an input by a temporary copy.
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

// A count of elements that exceeds every memory, and whose count of bytes does not overflow.
inline constexpr int64_t kMaxElements = int64_t{1} << 52;

inline constexpr std::string_view kInPlace = "the tensor";
inline constexpr std::string_view kInput = "the input";
inline constexpr std::string_view kOutput = "the output";

// Returns "(2, 3)" and the like.
std::string shape_of(const at::Tensor& tensor);

[[noreturn]] void refuse_tensor(const Communicator& communicator, std::string_view operation,
                                const std::string& problem);

// Returns the dtype of a supported tensor. Unless it is an input, autograd must allow that it is
// changed in place.
DType check_tensor(const Communicator& communicator, std::string_view operation,
                   std::string_view role, const at::Tensor& tensor);
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

// Throws for tensors that share memory with a tensor of another entry of the lists; tensors of one
// entry may share memory. Only the first element of a tensor with gaps is checked.
void check_entries_apart(const Communicator& communicator, std::string_view operation,
                         std::initializer_list<const std::vector<at::Tensor>*> lists);

// Checks a list with one tensor for each rank; returns their dtype. `listed` is kInput or kOutput.
DType check_list(const Communicator& communicator, std::string_view operation,
                 std::string_view listed, const std::vector<at::Tensor>& tensors);
// Checks the other tensor of a list operation: it must have the dtype of the list and, if this rank
// has a list, as many elements as this rank's entry. Returns its dtype.
DType check_beside_list(const Communicator& communicator, std::string_view operation,
                        std::string_view role, const at::Tensor& tensor,
                        const std::vector<at::Tensor>& tensors);

// The number of rows of all_to_all's tensors that go to each rank and come from it; empty lists
// divide the rows evenly.
struct RowSplits {
  std::span<const int64_t> output;
  std::span<const int64_t> input;
};

// The dtype and sizes that all_to_all exchanges; empty `counts` stand for even parts.
struct Exchange {
  DType dtype;
  std::vector<uint64_t> input_counts;
  std::vector<uint64_t> output_counts;
};
Exchange check_exchange(const Communicator& communicator, std::string_view operation,
                        const at::Tensor& output, const at::Tensor& input, const RowSplits& splits);

}  // namespace cadre
