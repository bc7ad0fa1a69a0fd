// Keeps the memory of a tensor, whatever the program does to the tensor meanwhile.
//
// A copy of the tensor would not be enough: set_data() gives it another storage, and resize_()
// gives its storage other memory and frees the previous one.
// Threads: as a change of the tensor. Blocking: never. Errors: none. No other thread may use the
// storage during the first call for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace cadre {

// Returns an object that keeps the tensor's present memory from being freed; null for an undefined
// tensor. Memory of libtorch's own allocator becomes shared between the storage and the results.
// Any other memory cannot be resized; the result keeps its storage.
std::shared_ptr<const void> hold_memory(const at::Tensor& tensor);

}  // namespace cadre
