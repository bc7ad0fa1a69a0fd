// Keeps the memory of a tensor, whatever the program does to the tensor meanwhile.
//
// A copy of the tensor would not do: set_data() gives it another storage, and resize_() gives its
// storage other memory and frees the old.
// Threads: as a change of the tensor. Blocking: never. Errors: none. The storage must not be used
// by another thread during the first call for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace cadre {

// The memory that the tensor has now is not freed while the result lives. Null for an undefined
// tensor. Memory of libtorch's own allocator becomes shared between the storage and the results;
// any other memory cannot be resized, and its storage is kept.
std::shared_ptr<const void> hold_memory(const at::Tensor& tensor);

}  // namespace cadre
