// Helpers for datasets whose samples are the rows of tensors in memory.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace cadre {

// Returns the bytes of a contiguous tensor.
std::string_view sample_bytes(const at::Tensor& tensor);

// Returns a hash of the sizes and bytes of contiguous tensors.
uint64_t digest_of(std::initializer_list<at::Tensor> tensors);

// Throws unless samples [begin, end) are within [0, size].
void check_slice(std::string_view dataset, int64_t begin, int64_t end, int64_t size);

}  // namespace cadre
