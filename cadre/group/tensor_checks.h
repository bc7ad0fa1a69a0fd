// Checks of the tensors of an operation.
//
// Threads: any. Blocking: never. Errors: each throws kInvalidArgument that names the operation, the
// group and this rank, says what was passed and what to pass instead.
// `role` is kInPlace, kInput or kOutput. A remedy in a message never loses a result: it replaces
// only an input by a temporary copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/types.h"
#include "cadre/comm/communicator.h"
#include "cadre/group/process_group.h"

namespace cadre {

inline constexpr std::string_view kInPlace = "the tensor";
inline constexpr std::string_view kInput = "the input";
inline constexpr std::string_view kOutput = "the output";

// "(2, 3)".
std::string shape_of(const at::Tensor& tensor);

[[noreturn]] void refuse_tensor(const Communicator& communicator, std::string_view operation,
                                const std::string& problem);

// Returns the dtype of a supported tensor.
DType check_tensor(const Communicator& communicator, std::string_view operation,
                   std::string_view role, const at::Tensor& tensor);
void check_contiguous(const Communicator& communicator, std::string_view operation,
                      std::string_view role, const at::Tensor& tensor);
// Refuses an expanded tensor, which cannot hold a result for each of its elements.
void check_elements_apart(const Communicator& communicator, std::string_view operation,
                          const at::Tensor& tensor);
void check_reduce_op(const Communicator& communicator, std::string_view operation, DType dtype,
                     ReduceOp op);

// Of the pair of an all_gather or reduce_scatter: the large one, which is the output or the input,
// has world_size times the elements of the other.
DType check_pair(const Communicator& communicator, std::string_view operation,
                 const at::Tensor& output, const at::Tensor& input, bool output_is_large);
// Of gather and scatter: only the root has the large tensor.
DType check_rooted(const Communicator& communicator, std::string_view operation, Rank root,
                   const at::Tensor& output, const at::Tensor& input, bool output_is_large);

// What all_to_all_single exchanges: even parts when `counts` are empty.
struct Exchange {
  DType dtype;
  std::vector<uint64_t> input_counts;
  std::vector<uint64_t> output_counts;
};
Exchange check_exchange(const Communicator& communicator, std::string_view operation,
                        const at::Tensor& output, const at::Tensor& input,
                        const AllToAllOptions& options);

}  // namespace cadre
